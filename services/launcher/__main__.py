"""Entry point of ``toka`` and ``python -m services.launcher``. Ctrl-C ends it without a traceback from the start."""

import signal


def main() -> None:
    """Run ``toka``. Ctrl-C ends the process without a traceback before ``toka`` handles signals."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from services.launcher.toka import main as toka  # takes half a second

    toka()


if __name__ == "__main__":
    main()
