"""The data of one step: plan, slots, checks, codec and noise.

Threads: ``compute``; ``answers`` encodes results.
"""
