"""Pages that show a plan in a browser: nothing else in ogc depends on this package."""
