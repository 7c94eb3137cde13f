"""Memory of large tensors that can be given back and taken again at the same addresses.

Threads: the compute thread, and the thread that boots.
"""
