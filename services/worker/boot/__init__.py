"""The start of a worker: weights, KV cache, and every kernel compiled before the first request.

Threads: ``compute`` boots; ``load FlashInfer`` loads that library at the same time; the event loop reads progress and
starts the child process of ``precompile``.
"""
