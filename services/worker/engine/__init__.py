"""Runs plans in order and sends their results.

Threads: ``compute`` decodes, checks and runs plans; ``answers`` waits for the device and encodes results (on a CPU
``compute`` does). ``event loop`` and ``rpc_N`` call it.
"""
