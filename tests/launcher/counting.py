"""A child that writes twenty lines, and ends. For ``test_supervisor``."""

import sys

for number in range(20):
    print("line", number, file=sys.stderr, flush=True)
sys.exit(3)
