"""Tokens that the last pipeline stage samples and the first one needs as inputs."""

from collections import deque

import numpy as np
import torch

from services.worker.parallel.channel import Receiver

# Forward passes whose tokens may be outstanding although nobody needs them.
_MOST_PENDING = 256


class OwedTokens:
    """What was sampled is taken when an input needs it and not before, so that micro-batches follow each other without
    waiting. Owned by the compute thread of a rank of the first stage."""

    def __init__(self, receiver: Receiver, last_tokens: torch.Tensor) -> None:
        """``last_tokens [max_slots]`` int64: of the slots, filled as tokens come."""
        self._receiver, self._last_tokens = receiver, last_tokens
        self._pending: deque[np.ndarray] = deque()  # slots of each message that was not taken yet
        self._expected = self._taken = 0  # messages so far
        self._message = np.zeros(len(last_tokens), np.int64)  # of each slot: the last one that has a token for it

    def expect(self, slots: np.ndarray) -> None:
        """A forward pass is on its way that samples for ``slots [n]``, n > 0: one message with a token for each."""
        self._receiver.expect((len(slots),), torch.int64, self._last_tokens.device)
        self._pending.append(slots)
        self._expected += 1
        self._message[slots] = self._expected
        while len(self._pending) > _MOST_PENDING:
            self._take()

    def settle(self, slots: np.ndarray) -> None:
        """Wait until ``last_tokens`` has what was sampled for ``slots [n]`` last."""
        needed = int(self._message[slots].max(initial=0))
        while self._taken < needed:
            self._take()

    def forget(self) -> None:
        """Wait for all that is outstanding."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        # In order: the message behind is newer, whoever has the slot by now.
        tokens = self._receiver.take()
        self._last_tokens[torch.from_numpy(self._pending.popleft())] = tokens
        self._taken += 1
