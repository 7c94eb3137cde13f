"""Anthropic's Messages API.

Threads: the event loop. ``text_N`` parses long bodies.
"""
