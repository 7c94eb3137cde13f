"""Sampling of tokens from logits: noise, penalties, truncation, grammars and log-probabilities.

Threads: ``compute``; ``shard-N`` on CPUs; ``answers`` reads results; ``grammars_N`` compiles grammars and
``matchers_N`` copies them.
"""
