"""Callers that wait until a pause begins."""

from concurrent.futures import Future

from services.common.boundaries import errors_to
from services.common.errors import FailedPrecondition
from services.scheduler.core.request import PauseMode
from services.scheduler.core.scheduler import Scheduler


class Pauses:
    """The calls of ``pause`` whose pause has not begun. Used by the step loop."""

    def __init__(self) -> None:
        self._calls: list[tuple[Future[int], int]] = []  # and the samples that each ended

    def request(self, core: Scheduler, mode: PauseMode | None, *, recompute: bool, began: Future[int]) -> None:
        """Pause ``core``. ``began`` gets the number of samples that this ended, when the pause has begun.

        ``mode`` None stands for the pause that was requested before.
        """
        if began.set_running_or_notify_cancel():
            with errors_to(began.set_exception):
                if mode is None and core.state.queue.pause is None:
                    raise _resumed()
                self._calls.append((began, 0 if mode is None else core.pause(mode, recompute=recompute)))

    def complete(self, core: Scheduler) -> None:
        """Complete the calls if the pause has begun."""
        if self._calls and core.is_paused:
            for began, ended in self._calls:
                began.set_result(ended)
            self._calls.clear()

    def resume(self, core: Scheduler) -> None:
        """Resume ``core``, and fail the calls."""
        core.resume()
        for began, _ in self._calls:
            began.set_exception(_resumed())
        self._calls.clear()


def _resumed() -> FailedPrecondition:
    return FailedPrecondition("the scheduler was resumed before the pause had begun")
