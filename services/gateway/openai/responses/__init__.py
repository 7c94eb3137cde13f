"""OpenAI's Responses API.

Threads: the event loop; ``text_N`` for long conversations.
"""
