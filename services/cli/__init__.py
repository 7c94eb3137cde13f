"""``toka-bench``, ``toka-doctor`` and ``toka-top``: programs for use at a terminal.

Nothing here imports torch. Only the doctor uses code of services: the worker's rules of memory, and the launcher's
choice of GPUs. ``services.common.config`` parses the command lines, as it does for the services.
"""
