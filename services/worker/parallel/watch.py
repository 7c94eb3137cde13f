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


class PeerWatch:
    """Waits for the next worker's farewell: the wait ends with that, or with the connection.

    Each watches one other, in a ring, so that the end of one is the end of all, one after the other.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, names: list[str]) -> None:
        """``group``: of all workers, for nothing else; ``rank``: this one's there; ``names``: as messages call them."""
        self._group, self._before = group, (rank - 1) % len(names)
        self._lock = threading.Lock()  # of what follows
        self._lost: ParallelError | None = None
        self._on_lost: Callable[[ParallelError], None] | None = None
        self._closed = False
        following = (rank + 1) % len(names)
        farewell = torch.empty(1)
        work = dist.irecv(farewell, group=group, group_src=following)
        threading.Thread(target=self._wait, args=(work, farewell, names[following]), name="peers", daemon=True).start()

    def tell(self, on_lost: Callable[[ParallelError], None]) -> None:
        """Have ``on_lost`` called once when the next worker has gone, in whatever thread; now, if it has already."""
        with self._lock:
            lost, self._on_lost = self._lost, on_lost
        if lost is not None:
            on_lost(lost)

    def close(self) -> None:
        """Look no longer, and let the worker before know."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(RuntimeError):  # it has gone itself
            dist.isend(torch.zeros(1), group=self._group, group_dst=self._before).wait(_FAREWELL)

    def _wait(self, work: dist.Work, farewell: torch.Tensor, name: str) -> None:
        how = "has left"
        try:
            work.wait(_FOREVER)
        except RuntimeError:
            how = "is lost"
        with self._lock:
            if self._closed:
                return
            self._lost = ParallelError(f"{name} of this replica {how}; start all of its workers again")
            lost, told = self._lost, self._on_lost
        if told is not None:
            told(lost)
