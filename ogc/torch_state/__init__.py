"""Torch's own state and the model's: read, compared, put back; the allocator; which torch internals we rely on."""
