"""``toka-bench serve|monkeys|latency``: sends load to any OpenAI server and measures it.

The programs in ``bench/`` import the modules that send and measure. Only the modules of the command need rich:
``app.py``, ``commands/``, ``run.py`` and ``display.py``.
"""

from services.cli.entry import run


def main() -> None:
    """Run the ``toka-bench`` command."""
    run("toka-bench", "services.cli.bench.app")
