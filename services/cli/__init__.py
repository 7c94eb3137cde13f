"""``toka-bench``, ``toka-doctor`` and ``toka-top``: programs for people at a terminal. No torch in here; of the
services only the doctor uses code: the worker's rules of memory, and how the launcher chooses GPUs.

Services take ``key=value``, as the original Tokasaurus did. These commands have ``--options`` instead, which typer
makes help, checks and shell completion from: they have subcommands and many choices, and no manifest starts them.
"""
