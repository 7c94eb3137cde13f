"""The step plan and its result as data: the contract between a scheduler and its workers.

``types`` are the values, ``rules`` the one judge of plans, ``result_rules`` that of results, ``slots`` the state
that plans are judged by. ``codec`` alone knows the messages of ``tokasaurus.worker.v1``. Threads: any. Only
``SlotState`` changes, and it belongs to its caller.
"""
