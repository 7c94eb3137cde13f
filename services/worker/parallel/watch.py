"""Notices that a worker of the replica has gone, also while none of them computes."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from services.worker.parallel.errors import ParallelError

_FOREVER = timedelta(days=3650)
_FAREWELL = timedelta(seconds=5)
_FAREWELL_BYTES = 512
# By how much a step that fails may be ahead of the news of what it fails for.
_NEWS_S = 1.0


class PeerWatch:
    """Waits for the next worker's farewell: the wait ends with that, or with the connection.

    Each watches one other, in a ring, and hands on what it hears, so that all know at once, and why.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, names: list[str]) -> None:
        """``group``: of all workers, for nothing else; ``rank``: this one's there; ``names``: as messages call them."""
        self._group, self._before, self._name = group, (rank - 1) % len(names), names[rank]
        self._lock = threading.Lock()  # of what follows
        self._lost: ParallelError | None = None
        self._on_lost: Callable[[ParallelError], None] | None = None
        self._farewell: tuple[dist.Work | None, torch.Tensor] | None = None  # on its way
        self._closed = False
        self._known = threading.Event()  # there is a ``_lost``
        following = (rank + 1) % len(names)
        farewell = torch.empty(_FAREWELL_BYTES, dtype=torch.uint8)
        work = dist.irecv(farewell, group=group, group_src=following)
        threading.Thread(target=self._wait, args=(work, farewell, names[following]), name="peers", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether the replica cannot go on."""
        return self._known.is_set()

    def tell(self, on_lost: Callable[[ParallelError], None]) -> None:
        """Have ``on_lost`` called once, in whatever thread, when the replica cannot go on; now, if that is known."""
        with self._lock:
            lost, self._on_lost = self._lost, on_lost
        if lost is not None:
            on_lost(lost)

    def give_up(self, error: ParallelError) -> None:
        """The replica cannot go on: all workers are told ``error``, unless they know of another. Any thread."""
        with self._lock:
            if self._closed or self._lost is not None:
                return
            self._lost, told = error, self._on_lost
            self._say(error.message)
        self._known.set()
        if told is not None:
            told(error)

    def cause(self, error: ParallelError) -> ParallelError:
        """What a step that failed with ``error`` failed for: a loss, or else ``error``, which all are told."""
        if not self._known.wait(_NEWS_S):
            self.give_up(error)
        return self._lost or error

    def close(self) -> None:
        """Look no longer, and let the worker before know."""
        with self._lock:
            self._closed = True
            if self._lost is None:
                self._say(f"{self._name} of this replica has left; start all of its workers again")
        if self._farewell is not None:
            with contextlib.suppress(RuntimeError):
                self._farewell[0].wait(_FAREWELL)  # type: ignore[union-attr]  # None only outside of the group

    def _say(self, reason: str) -> None:
        """To the worker before; once, under the lock."""
        padded = reason.encode()[:_FAREWELL_BYTES].ljust(_FAREWELL_BYTES, b"\0")
        message = torch.tensor(list(padded), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # it has gone itself
            self._farewell = dist.isend(message, group=self._group, group_dst=self._before), message

    def _wait(self, work: dist.Work, farewell: torch.Tensor, name: str) -> None:
        try:
            work.wait(_FOREVER)
            reason = bytes(farewell.tolist()).rstrip(b"\0").decode(errors="ignore")
        except RuntimeError:
            reason = f"{name} of this replica is lost; start all of its workers again"
        self.give_up(ParallelError(reason))
