"""Networks that are trained here and that torchvision does not have."""
