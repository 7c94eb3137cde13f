"""Requests on their way to schedulers: routing, sessions, failover, and the metrics of requests.

Threads: the event loop. ``text_N`` reads whole answers; ``asyncio_N`` makes the choices of many prompts.
"""
