"""Tokenizers, chat templates, detokenization and grammars.

Threads: ``text_N`` in a gateway and a scheduler, and the event loop for small texts; ``compute``, ``shard-N`` and
``grammars_N`` in a worker.
"""
