"""The HTTP application of a gateway, its operators' port, and the probes.

Threads: the event loop.
"""
