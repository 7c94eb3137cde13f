"""``toka-bench``, ``toka-doctor`` and ``toka-top``: programs for use at a terminal.

Nothing here imports torch. Of the services, only the doctor uses code: the worker's rules of memory, and the launcher's
choice of GPUs. Command lines are read by ``services.common.config``, as those of the services are.
"""
