"""Accepted samples that are not running, and the order in which they are served."""
