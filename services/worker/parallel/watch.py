"""Detection of a lost worker of the replica, even while no step runs."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from services.worker.parallel.errors import ParallelError

_FOREVER = timedelta(days=3650)
_FAREWELL_TIMEOUT = timedelta(seconds=5)
_FAREWELL_BYTES = 512
# Time for which a failed step waits for the message about a lost worker, which may arrive later than the failure.
_CAUSE_TIMEOUT_S = 1.0


class PeerWatch:
    """A watch over the next worker, in a ring of all workers.

    It waits for a farewell message, which gives a reason, or for the end of the connection. It sends the reason on to
    the previous worker, so that all workers soon have it.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, names: list[str]) -> None:
        """``group``: all workers, for this purpose only. ``rank``: this worker's. ``names``: the workers' in errors."""
        self._group, self._previous, self._name = group, (rank - 1) % len(names), names[rank]
        self._lock = threading.Lock()  # protects the next four fields
        self._lost: ParallelError | None = None
        self._on_lost: Callable[[ParallelError], None] | None = None
        self._farewell: tuple[dist.Work | None, torch.Tensor] | None = None  # the message in transit
        self._closed = False
        self._known = threading.Event()  # ``_lost`` is set
        following = (rank + 1) % len(names)
        farewell = torch.empty(_FAREWELL_BYTES, dtype=torch.uint8)
        work = dist.irecv(farewell, group=group, group_src=following)
        threading.Thread(target=self._wait, args=(work, farewell, names[following]), name="peers", daemon=True).start()

    @property
    def lost(self) -> bool:
        """True if the replica cannot continue."""
        return self._known.is_set()

    def notify(self, on_lost: Callable[[ParallelError], None]) -> None:
        """Call ``on_lost`` once, in any thread, when the replica cannot continue; now, if it already cannot."""
        with self._lock:
            lost, self._on_lost = self._lost, on_lost
        if lost is not None:
            on_lost(lost)

    def fail(self, error: ParallelError) -> None:
        """Record that the replica cannot continue, and send ``error`` on. A later error is ignored. Any thread."""
        with self._lock:
            if self._closed or self._lost is not None:
                return
            self._lost, on_lost = error, self._on_lost
            self._send_farewell(error.message)
        self._known.set()
        if on_lost is not None:
            on_lost(error)

    def cause(self, error: ParallelError) -> ParallelError:
        """Return the loss that made a step fail with ``error``. If there is none, fail with ``error`` and return it."""
        if not self._known.wait(_CAUSE_TIMEOUT_S):
            self.fail(error)
        return self._lost or error

    def close(self) -> None:
        """End the watch, and send a farewell to the previous worker."""
        with self._lock:
            self._closed = True
            if self._lost is None:
                self._send_farewell(f"{self._name} of this replica has left; start all of its workers again")
        if self._farewell is not None:
            with contextlib.suppress(RuntimeError):
                self._farewell[0].wait(_FAREWELL_TIMEOUT)  # type: ignore[union-attr]  # None only outside the group

    def _send_farewell(self, reason: str) -> None:
        """Send ``reason`` to the previous worker. Called once, under the lock."""
        padded = reason.encode()[:_FAREWELL_BYTES].ljust(_FAREWELL_BYTES, b"\0")
        message = torch.tensor(list(padded), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # the previous worker has exited as well
            self._farewell = dist.isend(message, group=self._group, group_dst=self._previous), message

    def _wait(self, work: dist.Work, farewell: torch.Tensor, name: str) -> None:
        try:
            work.wait(_FOREVER)
            reason = bytes(farewell.tolist()).rstrip(b"\0").decode(errors="ignore")
        except RuntimeError:
            reason = f"{name} of this replica is lost; start all of its workers again"
        self.fail(ParallelError(reason))
