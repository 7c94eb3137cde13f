"""Memory of large tensors that can be given back and taken again at the same addresses, and memory of other processes.

Threads: the compute thread, the thread that boots, and RPC threads for memory of other processes.
"""
