"""What a call is, and what ran which calls."""
