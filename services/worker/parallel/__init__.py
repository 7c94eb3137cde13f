"""Ranks of one replica: collectives, peer memory, agreement on plans.

Threads: ``compute``; ``agreement`` compares plans at the end of a stream; ``peers`` notices that the next rank exits.
"""
