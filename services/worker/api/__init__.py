"""The gRPC service of the worker.

Threads: ``rpc_N``, one for each call, sends; ``plans`` receives plans; gRPC's own thread starts calls; ``asyncio_N``
drains.
"""
