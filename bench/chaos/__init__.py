"""A verified load while services are killed, stopped, cut off and restarted: ``python -m bench.chaos``."""
