"""The commands of ``toka-bench``."""
