"""The host of a process: memory, processors, file descriptors, private files, ports that processes share.

Threads: the caller's. The umask is set on the main thread before any other thread starts.
"""
