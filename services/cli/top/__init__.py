"""The command ``toka-top``, which shows a running deployment on a terminal."""

from services.cli.entry import run


def main() -> None:
    """Run the ``toka-top`` command."""
    run("toka-top", "services.cli.top.command")
