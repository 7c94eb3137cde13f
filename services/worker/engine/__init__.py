"""Runs plans in order and sends their results.

Threads: ``compute`` decodes, checks and runs plans; ``answers`` waits for the device and encodes results (``compute``
does both on a CPU). The event loop and ``rpc_N`` call the engine.
"""
