"""The gRPC side of the worker.

Threads: ``rpc_N``, one for each call; ``plans`` receives plans; gRPC's events begin calls; ``asyncio_N`` drains.
"""
