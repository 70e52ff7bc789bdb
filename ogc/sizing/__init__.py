"""What a step needs of a device, and what fits on one: nothing else in ogc depends on this package."""
