"""The link to the workers of one replica.

Threads: ``worker-link`` connects; ``step-loop`` and gRPC's sender send plans; ``worker-answers`` reads results.
"""
