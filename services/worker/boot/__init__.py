"""The start of a worker: weights, KV cache, and every kernel compiled before the first request.

Threads: ``compute``. ``load FlashInfer`` loads beside it; the event loop reads progress and starts the child of
``precompile``.
"""
