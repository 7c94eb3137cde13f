"""The step plan and its result as data: the contract between a scheduler and its workers.

``types`` are the values, ``rules`` the one judge of plans, ``slots`` the state that it judges by. ``codec`` alone knows
the messages of ``tokasaurus.worker.v1``. Threads: any. Only ``SlotState`` changes, and it belongs to its caller.
"""
