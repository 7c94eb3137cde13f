"""Recordings of plans and results: how they are written, checked, replayed and inspected.

Threads: ``step-loop`` hands messages to ``recorder``, which writes. ``toka-replay`` and ``toka-inspect`` read on their
main thread.
"""
