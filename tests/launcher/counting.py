"""A child that writes twenty lines, and ends with the status that it was told. For ``test_supervisor``."""

import sys

for number in range(20):
    print("line", number, file=sys.stderr, flush=True)
sys.exit(int(sys.argv[1]))
