"""Descriptions of models and ranks, and the sizes that follow from them. No torch: ``toka-doctor`` reads them.

Threads: ``compute`` at the boot; the main thread of ``toka-doctor``.
"""
