"""The scheduler's decisions: pure code without I/O or a clock.

Threads: the step loop's alone. Before the core has a request, the event loop that makes it owns it.
"""
