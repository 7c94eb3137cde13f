"""What a rank gives the others of its replica and takes from them, around a step's kernels.

As ``runner/stage_runner.py``, of which see why no waits go round in a circle, but for a stream in the place of a
thread: nothing here waits on the host, and the device finds what it needs when it comes so far.
"""

import math

import numpy as np
import torch

from services.worker.described.ranks import ALONE
from services.worker.parallel.exchange import ALONE as NOTHING_EXCHANGED
from services.worker.parallel.exchange import Exchange, Exchanges
from services.worker.parallel.group import RankGroup
from services.worker.parallel.owed import OwedTokens
from services.worker.runner.cuda.inputs import GRAIN
from services.worker.step.slots import SlotTable


class Peers:
    """Owned by the compute thread. All ranks call the same, with sizes that follow from the plans."""

    def __init__(self, group: RankGroup, exchanges: Exchanges, hidden_size: int, dtype: torch.dtype) -> None:
        """``dtype``: of the residual stream, whose rows are ``hidden_size`` wide."""
        self._group, self._exchanges, self._hidden_size, self._dtype = group, exchanges, hidden_size, dtype
        self._owed: OwedTokens | None = None
        ranks = group.ranks
        self.first, self.last, self.reports, self.name = ranks.first, ranks.last, ranks.reports, ranks.name()
        self.grain = math.lcm(GRAIN, ranks.tp_size)

    def keep_in(self, last_tokens: torch.Tensor) -> None:
        """``last_tokens [max_slots]`` int32: where what other ranks sample is kept."""
        if self._group.tokens_in is not None:
            self._owed = OwedTokens(self._group.tokens_in, last_tokens)

    def exchange(self, tokens: int) -> Exchange:
        """For a forward pass over ``tokens`` tokens, padding included."""
        return self._exchanges.of(tokens)

    def room(self, tokens: int, device: torch.device) -> torch.Tensor | None:
        """For what enters in steps of up to ``tokens`` tokens, zeros; None where token ids do."""
        return None if self.first else torch.zeros(tokens, self._hidden_size, dtype=self._dtype, device=device)

    def enter(self, tokens: int, rows: np.ndarray, slots: SlotTable, parts: int) -> torch.Tensor | None:
        """A micro-batch of ``tokens`` tokens, padding included, of a step that is cut into ``parts``: what the stage
        before handed on, ``[rows, hidden_size]``; None where token ids enter. What is launched from here on finds in
        ``last_tokens`` what it needs for ``rows [n]``, which are slots."""
        if self._owed is not None:
            self._owed.settle(rows[slots.computed[rows] >= slots.given[rows]], parts)
        if self.first:
            return None
        # It is there for all but the first stage.
        return self._group.from_previous.receive((self.exchange(tokens).rows(tokens), self._hidden_size), self._dtype)  # type: ignore[union-attr]

    def hand_on(self, leaving: torch.Tensor, sample_slots: np.ndarray) -> None:
        """``leaving``, which must not change any more, to the next stage, where ``sample_slots [samples]`` of it are
        sampled."""
        self._group.to_next.send(leaving)  # type: ignore[union-attr]  # not the last: it is there
        if self._owed is not None and len(sample_slots):
            self._owed.expect(sample_slots)

    def tell(self, token_ids: torch.Tensor) -> None:
        """What was sampled, ``[samples]`` int32, which must not change any more, to the first stage."""
        if self._group.tokens_out is not None and len(token_ids):
            self._group.tokens_out.send(token_ids)

    def forget(self) -> None:
        """What is on its way is not needed: all ranks have run the same steps."""
        if self._owed is not None:
            self._owed.drain()
        self._group.drain()

    def close(self) -> None:
        """Leave the other ranks."""
        self._group.close()


class NoPeers:
    """In its place where there is one rank."""

    first = last = reports = True
    name, grain = ALONE.name(), GRAIN

    def keep_in(self, last_tokens: torch.Tensor) -> None: ...

    def exchange(self, tokens: int) -> Exchange:
        return NOTHING_EXCHANGED

    def room(self, tokens: int, device: torch.device) -> None: ...

    def enter(self, tokens: int, rows: np.ndarray, slots: SlotTable, parts: int) -> None: ...

    def hand_on(self, leaving: torch.Tensor, sample_slots: np.ndarray) -> None: ...

    def tell(self, token_ids: torch.Tensor) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...
