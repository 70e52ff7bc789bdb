"""What an operation costs: bytes and gradients as they are seen, seconds as they are estimated or measured."""
