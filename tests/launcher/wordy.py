"""A child that writes a million letters without an end of line, then a line, and ends. For ``test_supervisor``."""

import sys

sys.stderr.write("x" * 1_000_000 + "\nthe end\n")
sys.stderr.flush()
sys.exit(7)
