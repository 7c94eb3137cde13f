"""Descriptions of models and ranks, and the memory sizes derived from them.

``toka-doctor`` imports all modules except ``slices``, so only ``slices`` may import torch.

Threads: ``compute`` at the boot; the main thread of ``toka-doctor``.
"""
