"""Steps that are launched eagerly."""

import numpy as np
import torch

from services.worker.attention.base import RotatingAttentionStep
from services.worker.attention.cuda import CudaAttention, CudaAttentionStep, CudaBatch, Put
from services.worker.runner.cuda.graphs import Forward
from services.worker.runner.cuda.inputs import StepArrays, padded
from services.worker.runner.peers import Peers


class EagerSteps:
    """A launcher of forward passes without CUDA graphs, for any number of tokens. Owned by the compute thread."""

    reuses_output = False  # each step has an output of its own

    def __init__(self, forward: Forward, attention: CudaAttention, peers: Peers) -> None:
        self._forward, self._attention, self._peers = forward, attention, peers

    def size(self, tokens: int) -> int:
        """Return the token count to which a step of ``tokens`` tokens is padded."""
        return padded(tokens, self._peers.grain)

    def prepare(
        self, size: int, arrays: StepArrays, batch: CudaBatch, host_page_table: np.ndarray, put: Put
    ) -> CudaAttentionStep:
        """Prepare on the host the attention of a step for ``run``.

        ``arrays`` are those of the step on the host. The last three arguments are those of ``CudaAttention.prepare``.
        """
        return self._attention.prepare(batch, host_page_table, put)

    def run(
        self,
        size: int,
        entering: torch.Tensor,
        positions: torch.Tensor,
        attention: RotatingAttentionStep,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Launch a forward pass over ``size`` tokens.

        ``entering``: token ids ``[size]``, or the hidden states of the previous stage. ``positions [size]`` int32.
        ``keep [kept]`` int32: tokens that the last layer continues with; None = all. Return the output of the stage,
        ``[kept, hidden_size]``.
        """
        active = self._attention.active(attention)
        return self._forward(entering, positions, active, keep, self._peers.exchange(size))
