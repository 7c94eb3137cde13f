"""The link to the replica's worker."""
