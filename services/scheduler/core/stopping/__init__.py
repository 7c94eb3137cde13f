"""Stop strings and stop tokens of all running sequences."""
