"""The step loop, the thread that drives the core, and how other threads reach it."""
