"""Prometheus metrics that services share.

Threads: the event loop. Pages are rendered on ``asyncio_N``.
"""
