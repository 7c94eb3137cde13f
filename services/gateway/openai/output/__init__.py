"""The parts of an answer: reasoning, content and tool calls, read while they arrive.

Threads: the event loop; ``text_N`` for long answers.
"""
