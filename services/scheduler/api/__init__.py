"""The gRPC service of the scheduler.

Threads: the event loop, never the step loop. ``text_N`` renders chats and detokenizes; ``asyncio_N`` renders metrics.
"""
