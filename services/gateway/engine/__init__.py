"""The path of requests to schedulers: routing, sessions, failover, and the metrics of requests.

Threads: the event loop. ``text_N`` decodes whole answers. ``asyncio_N`` creates requests with many prompts.
"""
