"""Paged attention: the KV cache, and a backend for each kind of device.

Threads: ``compute``; ``shard-N`` on CPUs.
"""
