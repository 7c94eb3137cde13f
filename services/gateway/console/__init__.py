"""The console: a page that shows the figures of the deployment, and a playground.

Threads: the event loop.
"""
