"""Runs a command in the test's own process: most of the time of another one goes into what it imports."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple
from unittest import mock


class Outcome(NamedTuple):
    """The end of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(main: Callable[[], None], *arguments: str, environment: Mapping[str, str | None] | None = None) -> Outcome:
    """Call ``main`` with ``arguments`` and the variables of ``environment``; None: the variable is not set."""
    changed = {name: value for name, value in (environment or {}).items() if value is not None}
    kept = {name: value for name, value in os.environ.items() if name not in (environment or {})}
    stdout, stderr, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["toka", *arguments]),
        mock.patch.dict(os.environ, kept | changed, clear=True),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    return Outcome(status, stdout.getvalue(), stderr.getvalue())
