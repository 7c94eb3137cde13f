"""The execution of steps: inputs, model, sampling.

Threads: ``compute``; ``shard-N`` on CPUs.
"""
