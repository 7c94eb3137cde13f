"""Ranks of one replica: collectives, peer memory, agreement on plans, groups with trainers.

Threads: ``compute``; ``agreement`` compares plans at the end of a stream; ``peers`` notices that the next rank exits;
``update-group`` waits for a trainer.
"""
