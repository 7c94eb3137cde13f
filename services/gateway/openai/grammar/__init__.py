"""Structured output: how clients ask for it, and the grammar that an answer must follow.

Threads: the event loop; ``text_N`` composes large grammars.
"""
