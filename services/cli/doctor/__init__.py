"""The command ``toka-doctor``, which checks whether a deployment would start here. It starts and downloads nothing."""

from services.cli.entry import run


def main() -> None:
    """Run the ``toka-doctor`` command."""
    run("toka-doctor", "services.cli.doctor.command")
