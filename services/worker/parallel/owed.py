"""Tokens that the last pipeline stage samples and the first stage needs as inputs."""

from collections import deque

import numpy as np
import torch

from services.worker.parallel.channel import Receiver


class OwedTokens:
    """The messages with sampled tokens that the first stage has not received yet.

    A message is received when an input needs its tokens, or when many later micro-batches were sent. By then the tokens
    are sampled, so that micro-batches do not wait. Owned by the compute thread of a rank of the first stage.
    """

    def __init__(self, receiver: Receiver, last_tokens: torch.Tensor) -> None:
        """``last_tokens [max_slots]`` int32 or int64 receives the tokens, at their slots."""
        self._receiver, self._last_tokens = receiver, last_tokens
        self._pending: deque[np.ndarray] = deque()  # slots of each message that is not received yet
        self._expected = self._received = 0  # messages
        self._message = np.zeros(len(last_tokens), np.int64)  # number of the last message for each slot

    def expect(self, slots: np.ndarray) -> None:
        """Expect a message with one token for each of ``slots [n]``, n > 0. Call it when the micro-batch is sent."""
        self._pending.append(slots)
        self._expected += 1
        self._message[slots] = self._expected

    def settle(self, slots: np.ndarray, limit: int) -> None:
        """Receive the last sampled tokens of ``slots [n]``, and keep fewer than ``limit`` messages outstanding.

        On CUDA, the stream waits and not the host. The limit prevents the last stage from waiting for a receive.
        """
        needed = max(int(self._message[slots].max(initial=0)), self._expected - limit + 1)
        while self._received < needed:
            self._receive()

    def drain(self) -> None:
        """Receive all outstanding messages."""
        while self._pending:
            self._receive()

    def _receive(self) -> None:
        # Messages are received in order, so a newer token of a slot replaces an older one.
        slots = torch.from_numpy(self._pending.popleft())
        tokens = self._receiver.receive((len(slots),), self._last_tokens.dtype)
        if tokens.device.type == "cuda":  # without waiting for launched work
            slots = slots.pin_memory().to(tokens.device, non_blocking=True)
        self._last_tokens.index_copy_(0, slots, tokens)
        self._received += 1
