"""The step: builds the plan, and takes in the result."""
