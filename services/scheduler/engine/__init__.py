"""The step loop, which drives the core, and the queue through which other threads call it.

Threads: ``step-loop``. The event loop, ``worker-link``, ``worker-answers`` and ``asyncio_N`` put calls into the inbox.
"""
