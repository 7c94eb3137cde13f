"""Anthropic's Messages API.

Threads: the event loop; ``text_N`` for long bodies.
"""
