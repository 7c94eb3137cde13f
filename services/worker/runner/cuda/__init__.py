"""Steps on a CUDA device: CUDA graphs, uploads and downloads that overlap with computing.

Threads: ``compute`` launches; ``answers`` waits and reads.
"""
