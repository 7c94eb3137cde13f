"""A long mixed load, and the memory of every process at its begin and its end: ``python -m bench.soak``."""
