"""The step loop, which drives the core, and how other threads reach it.

Threads: ``step-loop``. The event loop, ``worker-link``, ``worker-answers`` and ``asyncio_N`` put calls into the inbox.
"""
