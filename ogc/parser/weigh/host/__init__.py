"""What the host does in a step: the runtime, and handing operations over to a GPU."""
