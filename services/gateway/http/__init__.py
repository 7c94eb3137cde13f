"""HTTP below the endpoints: connections, TLS, keys, limits, bodies and errors.

Threads: the event loop.
"""
