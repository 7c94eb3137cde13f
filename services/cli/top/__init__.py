"""``toka-top``: a running deployment on a terminal, as its gateway sees it."""

from services.cli.entry import run


def main() -> None:
    """The ``toka-top`` command."""
    run("toka-top", "services.cli.top.command")
