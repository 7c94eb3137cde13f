"""The step on a device: inputs, model, sampling.

Threads: ``compute``; ``shard-N`` on CPUs.
"""
