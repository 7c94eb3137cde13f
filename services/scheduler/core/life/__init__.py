"""The life of a sample: intake, admission to a slot, preemption, quarantine and its end."""
