"""Tokens that the last pipeline stage samples and the first one needs as inputs."""

from collections import deque

import numpy as np
import torch

from services.worker.parallel.channel import Receiver


class OwedTokens:
    """What was sampled is taken when an input needs it, or so many micro-batches later that it has long been sampled,
    so that micro-batches follow each other without waiting. Owned by the compute thread of a rank of the first stage.
    """

    def __init__(self, receiver: Receiver, last_tokens: torch.Tensor) -> None:
        """``last_tokens [max_slots]`` int32 or int64: of the slots, filled as tokens come."""
        self._receiver, self._last_tokens = receiver, last_tokens
        self._pending: deque[np.ndarray] = deque()  # slots of each message that was not taken yet
        self._expected = self._taken = 0  # messages so far
        self._message = np.zeros(len(last_tokens), np.int64)  # of each slot: the last one that has a token for it

    def expect(self, slots: np.ndarray) -> None:
        """A forward pass is on its way that samples for ``slots [n]``, n > 0: one message with a token for each."""
        self._pending.append(slots)
        self._expected += 1
        self._message[slots] = self._expected

    def settle(self, slots: np.ndarray, most: int) -> None:
        """Wait until ``last_tokens`` has what was sampled for ``slots [n]`` last, and fewer than ``most`` messages are
        outstanding, so that nobody waits to be rid of one; on CUDA, have the stream wait."""
        needed = max(int(self._message[slots].max(initial=0)), self._expected - most + 1)
        while self._taken < needed:
            self._take()

    def forget(self) -> None:
        """Wait for all that is outstanding."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        # In order: the message behind is newer, whoever has the slot by now.
        slots = torch.from_numpy(self._pending.popleft())
        tokens = self._receiver.take((len(slots),), self._last_tokens.dtype)
        if tokens.device.type == "cuda":  # without waiting for what is launched
            slots = slots.pin_memory().to(tokens.device, non_blocking=True)
        self._last_tokens.index_copy_(0, slots, tokens)
        self._taken += 1
