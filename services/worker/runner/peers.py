"""The messages between the ranks of a replica before and after the computations of a step.

Every rank receives the same plans and keeps the same state on its host, because lengths do not depend on the sampled
tokens. So each rank can compute from a plan alone which messages the others send and receive.

A rank waits only for the ranks of its stage in a collective, for activations of this micro-batch from the previous
stage, for tokens of earlier micro-batches from the last stage, and for the next stage to follow within a few
micro-batches. Each of these waits depends only on the same micro-batch in an earlier stage or on an earlier
micro-batch, so ranks cannot deadlock. On CUDA, only the stream of the device waits, and never the host.
"""

import math

import numpy as np
import torch

from services.worker.described.ranks import ALONE
from services.worker.parallel.exchange import ALONE as NOTHING_EXCHANGED
from services.worker.parallel.exchange import Exchange, Exchanges
from services.worker.parallel.group import RankGroup
from services.worker.parallel.owed import OwedTokens
from services.worker.step.slots import SlotTable

# On CUDA, token counts are multiples of this number, so that compiled code has no special sizes and matrix products are
# aligned.
GRAIN = 8
_NO_EXCHANGES = Exchanges((NOTHING_EXCHANGED,))


class Peers:
    """The messages of this rank. Owned by the compute thread. All ranks make the same calls with the same sizes."""

    def __init__(
        self,
        group: RankGroup | None = None,
        exchanges: Exchanges = _NO_EXCHANGES,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``group``: None if the replica has one rank. The others then have no effect.

        ``hidden_size`` and ``dtype`` are those of the residual stream.
        """
        self._group, self._exchanges, self._hidden_size, self._dtype = group, exchanges, hidden_size, dtype
        self._owed: OwedTokens | None = None
        ranks = ALONE if group is None else group.ranks
        self.alone, self.first, self.last, self.reports = group is None, ranks.first, ranks.last, ranks.reports
        self.name, self.tp_size = ranks.name(), ranks.tp_size
        self.grain = math.lcm(GRAIN, ranks.tp_size)  # on CUDA, token counts are multiples of it

    def receive_into(self, last_tokens: torch.Tensor) -> None:
        """Store the tokens that other ranks sample in ``last_tokens [max_slots]`` int32 or int64."""
        if self._group is not None and self._group.tokens_in is not None:
            self._owed = OwedTokens(self._group.tokens_in, last_tokens)

    def exchange(self, tokens: int) -> Exchange:
        """Return the exchange strategy of a forward pass over ``tokens`` tokens, padding included."""
        return self._exchanges.of(tokens)

    def input_buffer(self, tokens: int, device: torch.device) -> torch.Tensor | None:
        """Return zeros for the hidden states of up to ``tokens`` tokens, or None on the first stage."""
        return None if self.first else torch.zeros(tokens, self._hidden_size, dtype=self._dtype, device=device)

    def receive(self, tokens: int, rows: np.ndarray, slots: SlotTable, parts: int) -> torch.Tensor | None:
        """Receive the inputs of a micro-batch of ``tokens`` tokens, padding included, with slots ``rows [n]``.

        Return the hidden states of the previous stage, ``[rows, hidden_size]``, or None on the first stage. There, the
        inputs are in ``last_tokens``, on CUDA for later launches. ``parts``: micro-batches of the step.
        """
        if self._owed is not None:
            self._owed.settle(rows[slots.computed[rows] >= slots.given[rows]], parts)
        if self.first:
            return None
        # All stages but the first have ``from_previous``.
        return self._group.from_previous.receive((self.exchange(tokens).rows(tokens), self._hidden_size), self._dtype)  # type: ignore[union-attr]

    def send_hidden(self, leaving: torch.Tensor, sample_slots: np.ndarray) -> None:
        """Send ``leaving``, which must not change later, to the next stage. ``sample_slots`` are sampled from it."""
        self._group.to_next.send(leaving)  # type: ignore[union-attr]  # all stages but the last have ``to_next``
        if self._owed is not None and len(sample_slots):
            self._owed.expect(sample_slots)

    def send_tokens(self, token_ids: torch.Tensor) -> None:
        """Send the sampled ``token_ids [samples]`` to the first stage. They must not change later."""
        if self._group is not None and self._group.tokens_out is not None and len(token_ids):
            self._group.tokens_out.send(token_ids)

    def drain(self) -> None:
        """Wait for the messages in transit. All ranks must have run the same steps."""
        if self._owed is not None:
            self._owed.drain()
        if self._group is not None:
            self._group.drain()

    def close(self) -> None:
        """Close the connections to other ranks."""
        if self._group is not None:
            self._group.close()
