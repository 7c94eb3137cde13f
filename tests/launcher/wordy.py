"""A child that writes four million letters without an end of line, then a line, and ends. For ``test_supervisor``."""

import sys

sys.stderr.write("x" * 4_000_000 + "\nthe end\n")
sys.stderr.flush()
sys.exit(7)
