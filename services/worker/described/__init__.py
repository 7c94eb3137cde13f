"""Descriptions of models and ranks, and the memory sizes derived from them.

``toka-doctor`` imports all modules except ``load_targets``, so only ``load_targets`` may import torch.

Threads: ``compute`` at the boot; the main thread of ``toka-doctor``.
"""
