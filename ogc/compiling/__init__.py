"""Optional: plans for what torch.compile makes of a model, on the joint graph of forward and backward."""
