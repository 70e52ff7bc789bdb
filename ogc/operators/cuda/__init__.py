"""What CUDA runs in the place of operators, told by PyTorch's and cuDNN's documented rules; no GPU is needed."""
