"""How a backward depends on how the gradients that it is given are laid out."""
