"""The gRPC side of the scheduler: requests in, events out.

Threads: the event loop, never the step loop. ``text_N`` renders chats and detokenizes; ``asyncio_N`` renders metrics.
"""
