"""Sampling of tokens from logits: noise, penalties, truncation, grammars and log-probabilities.

Threads: ``compute``; ``shard-N`` on CPUs; ``answers`` reads outcomes; ``grammars_N`` and
``matchers_N`` follow grammars.
"""
