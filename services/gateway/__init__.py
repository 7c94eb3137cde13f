"""The gateway: OpenAI-compatible HTTP on one side, sessions with schedulers on the other.

Threads: the event loop. Work that takes long has threads of its own: ``text_N`` for texts, ``blobs_N`` for files.
"""
