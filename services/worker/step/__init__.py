"""The data of one step on a worker: slots, output, codec and noise.

Threads: ``compute``; ``answers`` encodes results.
"""
