"""The execution of steps on a CUDA device, with CUDA graphs and with transfers that overlap with computation.

Threads: ``compute`` launches steps; ``answers`` waits for them and reads results.
"""
