"""The store: files, Batch jobs, responses, conversations and chat completions that several gateways may share.

Threads: the event loop. ``blobs_N`` reads and writes files. SQLite statements run on ``_connection_worker_thread``.
"""
