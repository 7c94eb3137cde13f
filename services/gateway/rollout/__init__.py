"""Control of all schedulers by trainers and operators, under the names of vLLM and SGLang.

Threads: the event loop.
"""
