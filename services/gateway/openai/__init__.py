"""OpenAI's endpoints: bodies to jobs, tokens to answers.

Threads: the event loop; ``text_N`` for what takes long, such as long bodies, conversations and answers.
"""
