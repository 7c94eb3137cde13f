"""A long mixed load, and how much memory every process holds at its begin and at its end: ``python -m bench.soak``."""
