"""OpenAI's endpoints: bodies become prompt requests, and their tokens become answers.

Threads: the event loop; ``text_N`` for what takes long, such as long bodies, conversations and answers.
"""
