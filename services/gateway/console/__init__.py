"""The console: a web page with live figures of the deployment, and a playground.

Threads: the event loop.
"""
