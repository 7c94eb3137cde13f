"""Decoder layers and their weights.

Threads: ``compute``; ``shard-N`` on CPUs.
"""
