"""A child that starts a process of its own, tells its id on stderr, and waits. For ``test_supervisor``."""

import subprocess
import sys

inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(inner.pid, file=sys.stderr, flush=True)
inner.wait()
