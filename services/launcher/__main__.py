"""``toka`` and ``python -m services.launcher``: ends quietly on Ctrl-C from its first moment."""

import signal


def main() -> None:
    """Run ``toka``. Until it handles signals itself, Ctrl-C ends the process without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from services.launcher.toka import main as toka  # takes half a second

    toka()


if __name__ == "__main__":
    main()
