"""Rewrites of programs before they are planned, fx to fx: results are the model's up to rounding. Optional."""
