"""Descriptions of models and ranks, and the memory sizes derived from them.

``toka-doctor`` imports these modules, so none may import torch.

Threads: ``compute`` at the boot; the main thread of ``toka-doctor``.
"""
