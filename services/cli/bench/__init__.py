"""``toka-bench serve|monkeys|latency``: load for any OpenAI server, and what became of it.

What sends and measures is imported by the programs in ``bench/`` too, and needs neither typer nor rich: those are for
the command alone (``app.py``, ``commands/``, ``run.py``, ``display.py``).
"""

from services.cli.entry import run


def main() -> None:
    """The ``toka-bench`` command."""
    run("toka-bench", "services.cli.bench.app")
