"""Operators of a decoder layer: matrix products, norms, rotation, quantization.

Threads: ``compute``; ``shard-N`` on CPUs.
"""
