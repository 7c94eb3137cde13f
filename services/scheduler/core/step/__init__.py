"""One step: build the plan, take in the result."""
