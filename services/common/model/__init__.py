"""The files of a model: config, generation config, weights' headers. No torch.

Threads: the caller's.
"""
