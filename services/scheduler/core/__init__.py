"""Every decision, and nothing else: no I/O, no clock, no stubs. Driven by one thread, the step loop."""
