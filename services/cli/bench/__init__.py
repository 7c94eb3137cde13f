"""``toka-bench serve|monkeys|latency``: sends load to any OpenAI server and measures it.

The programs in ``bench/`` import the modules that send and measure. These do not need rich, which only the command
does (``app.py``, ``commands/``, ``run.py``, ``display.py``).
"""

from services.cli.entry import run


def main() -> None:
    """The ``toka-bench`` command."""
    run("toka-bench", "services.cli.bench.app")
