"""Paged attention: the KV cache, and the attention backends for CPU and CUDA.

Threads: ``compute``; ``shard-N`` on CPUs.
"""
