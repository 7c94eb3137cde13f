"""The command ``toka-inspect record=FILE_OR_DIR step=N | sequence=REQUEST_ID[:SAMPLE] | page=N``.

It shows a step, the history of a sequence, or the history of a page.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from rich.console import Console

from services.common.config import fail, from_command_line
from services.common.flags import Config, Int
from services.scheduler.record.page_view import PageView
from services.scheduler.record.reader import RECORD, Recording, RecordingError, find_recordings
from services.scheduler.record.sequence_view import SequenceView
from services.scheduler.record.step_view import StepView
from services.scheduler.record.view import View, walk

_WIDTH = 160  # columns, if the output is not a terminal


class InspectConfig(Config):
    """Show a step, the history of a sequence, or the history of a page from a recording."""

    variables: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # environment variables are for the services

    record: str = Field(description=RECORD)
    step: Int | None = Field(None, ge=1, description="show this step: its plan, its batch, its result")
    sequence: str = Field("", description="show the history of REQUEST_ID, or of one of its samples: REQUEST_ID:SAMPLE")
    page: Int | None = Field(None, ge=0, description="show the holders of this page, its copies and its tokens")


def main() -> None:
    config = from_command_line(InspectConfig)
    view = _view(config)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
    try:
        paths = find_recordings(config.record)
    except RecordingError as error:
        fail(str(error))
    shown, wrong = inspect(paths, view, console)
    if not shown:
        fail("the recording has no such step, sequence or page holder")
    sys.exit(1 if wrong else 0)


def inspect(paths: list[Path], view: Callable[[], View], console: Console) -> tuple[bool, bool]:
    """Show a new view of each recording. Return whether anything was shown, and whether a file was wrong.

    A file is wrong if it is damaged, or if a plan violates the contract.
    """
    shown = wrong = False
    for path in paths:
        seen = view()
        try:
            reason = walk(Recording(path), seen)
        except RecordingError as error:
            console.print(f"DAMAGED {error}", soft_wrap=True)
            wrong = True
            continue
        parts = seen.shown()
        shown, wrong = shown or bool(parts), wrong or bool(reason)
        if reason:
            parts = [*parts, f"the rest of the recording cannot be shown: {reason}"]
        if parts and len(paths) > 1:
            console.print(str(path), soft_wrap=True)
        for part in parts:
            console.print(part)
    return shown, wrong


def _view(config: InspectConfig) -> Callable[[], View]:
    chosen = [config.step is not None, bool(config.sequence), config.page is not None]
    if sum(chosen) != 1:
        fail("give one of step=N, sequence=REQUEST_ID[:SAMPLE] and page=N", status=2)
    if config.step is not None:
        return partial(StepView, config.step)
    if config.page is not None:
        return partial(PageView, config.page)
    return partial(SequenceView, config.sequence)


if __name__ == "__main__":
    main()
