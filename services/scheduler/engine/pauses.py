"""Callers that wait until a pause begins."""

import time
from concurrent.futures import Future
from typing import NamedTuple

from services.common.boundaries import errors_to
from services.common.errors import FailedPrecondition
from services.scheduler.core.request import PauseMode
from services.scheduler.core.scheduler import Scheduler


class Pause(NamedTuple):
    """A pause that a call requested or joined."""

    number: int  # requests of pauses so far, or 0 if another call requested it
    aborted: int  # samples that it ended

    @property
    def joined(self) -> bool:
        """True if another call requested the pause."""
        return not self.number


class Pauses:
    """The calls of ``pause`` whose pause has not begun. Used by the step loop."""

    def __init__(self) -> None:
        self._calls: list[tuple[Future[Pause], Pause]] = []
        self._number = 0  # requests of pauses so far
        self._began_s: float | None = None  # when the core paused

    def request(self, core: Scheduler, mode: PauseMode, *, recompute: bool, join: bool, began: Future[Pause]) -> None:
        """Pause ``core``, unless it is paused and ``join`` is true. ``began`` completes when the pause has begun."""
        if began.set_running_or_notify_cancel():
            with errors_to(began.set_exception):
                joined, aborted = join and core.state.queue.pause is not None, 0
                if not joined:
                    aborted = core.pause(mode, recompute=recompute)
                    self._number += 1
                self._calls.append((began, Pause(0 if joined else self._number, aborted)))

    def complete(self, core: Scheduler) -> None:
        """Complete the calls if the pause has begun."""
        if self._calls and core.is_paused:
            if self._began_s is None:
                self._began_s = time.monotonic()
            for began, pause in self._calls:
                began.set_result(pause)
            self._calls.clear()

    def resume(self, core: Scheduler, number: int | None = None) -> float | None:
        """Resume ``core``, fail the calls, and return for how many seconds it was paused.

        With ``number``, do nothing and return None unless the pause of this number is the last.
        """
        if number not in (None, self._number):
            return None
        core.resume()
        paused_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        self._began_s = None
        for began, _ in self._calls:
            began.set_exception(_resumed())
        self._calls.clear()
        return paused_s


def _resumed() -> FailedPrecondition:
    return FailedPrecondition("the scheduler was resumed before the pause had begun")
