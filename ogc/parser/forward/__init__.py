"""A model's own forward as all look at it: of flat tensors, without memory for a backward, each call with its place."""
