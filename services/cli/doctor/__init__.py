"""``toka-doctor``: would this start work here, and if not, what to change. It starts, loads and fetches nothing."""

from services.cli.entry import run


def main() -> None:
    """The ``toka-doctor`` command."""
    run("toka-doctor", "services.cli.doctor.command")
