"""Detection of ranks that received different plans. Such ranks would wait for each other for ever."""

import threading
import time

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not say that it exports it

from services.worker.described.ranks import Ranks
from services.worker.parallel.errors import ParallelError, lost_peer
from services.worker.parallel.watch import PeerWatch

# The scheduler ends all of its streams when one ends. A rank notices this when its connection times out, at the latest.
_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Agreement:
    """A comparison of the number of plans on all ranks, at the end of every stream.

    Ranks compute a step together, so each rank has to run every plan that another rank runs. A scheduler sends all
    plans to all ranks, but a connection can break after any message, and a started plan cannot be undone. So each rank
    runs all plans that it received, and publishes their number. Equal numbers mean equal plans. If they differ, some
    ranks wait for steps that others never run, and the replica has to restart.
    """

    def __init__(self, store: Store, ranks: Ranks, watch: PeerWatch) -> None:
        """All ranks share ``store``, which the first rank hosts. ``watch`` receives the error if the numbers differ."""
        self._store, self._ranks, self._watch = store, ranks, watch

    def settle(self, stream_id: str, plans: int, *, refused: bool = False) -> None:
        """Compare the numbers of plans of a stream that has ended, in a thread of its own.

        ``plans``: the number of plans that run here. ``refused``: the stream ended because the plan behind them was
        refused, which every rank does. Call this once for each stream, in any thread.
        """
        threading.Thread(target=self._settle, args=(stream_id, plans, refused), name="agreement", daemon=True).start()

    def _settle(self, stream_id: str, plans: int, refused: bool) -> None:
        if self._watch.lost:
            return
        try:
            with lost_peer(self._ranks.name(0)):
                self._store.set(_key(stream_id, self._ranks.index), f"{plans} {refused:d}")
                if plans:  # a plan ran, so the stream is open on every rank, and each will publish its number
                    self._compare(stream_id)
                self._delete_keys(stream_id)
        except ParallelError as error:
            self._watch.fail(error)

    def _compare(self, stream_id: str) -> None:
        keys = [_key(stream_id, index) for index in range(self._ranks.size)]
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [index for index, key in enumerate(keys) if not self._store.check([key])]
                raise ParallelError(
                    f"a stream of plans has ended, but not on {', '.join(map(self._ranks.name, missing))}, within"
                    f" {_TIMEOUT_S:g} s; start all workers of this replica again"
                )
            time.sleep(_POLL_S)
        ends = [tuple(map(int, value.split())) for value in self._store.multi_get(keys)]
        # Every rank that received a refused plan refuses it, so plans behind it do not count.
        limit = min((plans for plans, refused in ends if refused), default=max(plans for plans, _ in ends))
        if len({min(plans, limit) for plans, _ in ends}) > 1:
            numbers = ", ".join(f"{plans} on {self._ranks.name(index)}" for index, (plans, _) in enumerate(ends))
            raise ParallelError(
                f"a stream of plans has ended with different numbers of them ({numbers}); start all workers of this"
                " replica again"
            )

    def _delete_keys(self, stream_id: str) -> None:
        """Record that this rank has compared a stream. The last rank to do so deletes the keys of the stream."""
        done = f"plans/{stream_id}/done"
        if self._store.add(done, 1) == self._ranks.size:
            for key in (done, *(_key(stream_id, index) for index in range(self._ranks.size))):
                self._store.delete_key(key)


def _key(stream_id: str, index: int) -> str:
    return f"plans/{stream_id}/{index}"
