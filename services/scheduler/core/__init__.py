"""The scheduler's decisions: pure code without I/O or a clock, driven by the step loop's thread."""
