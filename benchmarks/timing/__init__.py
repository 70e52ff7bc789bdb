"""What plans promise and what steps pay, in time: ``python -m benchmarks.timing``, ``benchmark.py --suite time``."""
