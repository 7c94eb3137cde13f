"""Ranks that have got different plans end, instead of waiting for each other for ever."""

import threading
import time

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not say that it exports it

from services.worker.described.ranks import Ranks
from services.worker.parallel.errors import ParallelError, lost_peer
from services.worker.parallel.watch import PeerWatch

# The scheduler ends all of its streams when one ends; the news of it take as long as connections do.
_PATIENCE_S = 60.0
_POLL_S = 0.02


class Agreement:
    """Whether all ranks were given the same plans, settled at the end of every stream.

    Ranks compute a step together, so each has to run every plan that any of them runs. A scheduler sends all plans to
    all ranks, but a connection may break behind any message, and a plan that has begun cannot be taken back. So each
    rank runs all that it has received, and says how many plans that is: where the numbers are equal, so are the plans,
    and the next stream finds all ranks alike. Otherwise some wait for what others will never run.
    """

    def __init__(self, store: Store, ranks: Ranks, watch: PeerWatch) -> None:
        """``store``: all ranks have it, and the first keeps it; ``watch`` is told of numbers that differ."""
        self._store, self._ranks, self._watch = store, ranks, watch

    def settle(self, stream_id: str, plans: int, *, refused: bool = False) -> None:
        """A stream has ended here, of which ``plans`` plans are run. ``refused``: because of the next, which none of
        the ranks runs. To be called once for each stream, in any thread; returns at once."""
        threading.Thread(target=self._settle, args=(stream_id, plans, refused), name="agreement", daemon=True).start()

    def _settle(self, stream_id: str, plans: int, refused: bool) -> None:
        if self._watch.lost:
            return
        try:
            with lost_peer(self._ranks.name(0)):
                self._store.set(_key(stream_id, self._ranks.index), f"{plans} {refused:d}")
                if plans:  # every rank was ready for more, and will say how many it got
                    self._compare(stream_id)
                self._forget(stream_id)
        except ParallelError as error:
            self._watch.give_up(error)

    def _compare(self, stream_id: str) -> None:
        keys = [_key(stream_id, index) for index in range(self._ranks.size)]
        deadline = time.monotonic() + _PATIENCE_S
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                silent = [index for index, key in enumerate(keys) if not self._store.check([key])]
                raise ParallelError(
                    f"a stream of plans has ended, but not on {', '.join(map(self._ranks.name, silent))}, within"
                    f" {_PATIENCE_S:g} s; start all workers of this replica again"
                )
            time.sleep(_POLL_S)
        ends = [tuple(map(int, value.split())) for value in self._store.multi_get(keys)]
        # A plan that one refuses is refused by each that has it.
        most = min((plans for plans, refused in ends if refused), default=max(plans for plans, _ in ends))
        if len({min(plans, most) for plans, _ in ends}) > 1:
            numbers = ", ".join(f"{plans} on {self._ranks.name(index)}" for index, (plans, _) in enumerate(ends))
            raise ParallelError(
                f"a stream of plans has ended with different numbers of them ({numbers}); start all workers of this"
                " replica again"
            )

    def _forget(self, stream_id: str) -> None:
        """This rank looks no more at what was said of a stream; the last one to say so leaves nothing of it behind."""
        done = f"plans/{stream_id}/done"
        if self._store.add(done, 1) == self._ranks.size:
            for key in (done, *(_key(stream_id, index) for index in range(self._ranks.size))):
                self._store.delete_key(key)


def _key(stream_id: str, index: int) -> str:
    return f"plans/{stream_id}/{index}"
