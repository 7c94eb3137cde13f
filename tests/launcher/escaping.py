"""A child that leaves a process in a session of its own, tells its id on stderr, and ends. For ``test_supervisor``."""

import subprocess
import sys

left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(left.pid, file=sys.stderr, flush=True)
left.returncode = 0  # nobody waits for it
