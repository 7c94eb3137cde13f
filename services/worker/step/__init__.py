"""The data of one step on a worker: slots, output and noise.

Threads: ``compute``; ``answers`` encodes results.
"""
