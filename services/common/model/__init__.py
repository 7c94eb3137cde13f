"""Readers of a model's files: config, generation config, the headers of weight files. No torch.

Threads: the caller's.
"""
