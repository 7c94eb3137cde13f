"""How the ranks of a stage exchange a step's activations, around a layer's matrix products.

A strategy is chosen for each step and passed to the model's ``forward``; each is a variant that is compiled once. It
owns product and collective together, so that one that overlaps them fits in. ``tokens`` is everywhere the number of the
step's tokens; a rank's *rows* are what it has of the residual stream: its tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from services.worker.layers.fp8 import Quantized
from services.worker.parallel.operators import rows_each
from services.worker.parallel.ranks import Ranks

# The ranks of this process' stage, for operators.
TENSOR_RANKS = "tensor"
# With fewer tokens the latency of a collective counts, and one takes less than two.
FEWEST_SHARDED = 128

Values = torch.Tensor | Quantized
Product = Callable[[Values], torch.Tensor]


class Exchange(nn.Module, ABC):
    """Without state. A module, so that compilers take its numbers for constants."""

    @abstractmethod
    def rows(self, tokens: int) -> int:
        """How many rows of the residual stream a rank has."""

    @abstractmethod
    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        """``linear`` of all tokens, ``[tokens, this rank's outputs]``, from this rank's rows ``x [rows, inputs]``."""

    @abstractmethod
    def row(self, values: Values, linear: Product) -> torch.Tensor:
        """The sum over the ranks of ``linear(values)``, ``values [tokens, this rank's inputs]``: this rank's rows of
        it, ``[rows, outputs]``."""

    @abstractmethod
    def select(self, x: torch.Tensor, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        """The rows of the tokens ``keep [samples]``, all of them on every rank, from this rank's rows ``x``. From there
        on the strategy is ``kept``."""

    @property
    @abstractmethod
    def kept(self) -> "Exchange":
        """How to go on with few tokens that every rank has."""

    @abstractmethod
    def complete(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """All tokens' rows, ``[tokens, size]``, from this rank's rows ``x``."""


class Alone(Exchange):
    """One rank: nothing is exchanged."""

    def rows(self, tokens: int) -> int:
        return tokens

    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        return linear(x)

    def row(self, values: Values, linear: Product) -> torch.Tensor:
        return linear(values)

    def select(self, x: torch.Tensor, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        return x.index_select(0, keep)

    @property
    def kept(self) -> Exchange:
        return self

    def complete(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        return x


class AllReduce(Alone):
    """Every rank has all rows; what each has of a product is summed (Shoeybi et al. 2019)."""

    def __init__(self, group: str = TENSOR_RANKS) -> None:
        super().__init__()
        self.group = group

    def row(self, values: Values, linear: Product) -> torch.Tensor:
        partial = linear(values)
        torch.ops.tokasaurus.all_reduce_(partial, self.group)
        return partial


class SequenceSharded(Exchange):
    """Every rank has an equal run of the rows, and so norms and adds no more than that (Korthikanti et al. 2022). The
    last may have fewer tokens, and rows of zeros."""

    def __init__(self, rank: int, size: int, group: str = TENSOR_RANKS) -> None:
        super().__init__()
        self.rank, self.size, self.group = rank, size, group
        self._reduced = AllReduce(group)

    def rows(self, tokens: int) -> int:
        return rows_each(tokens, self.size)

    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        if isinstance(x, Quantized):  # half of what is sent otherwise
            return linear(Quantized(self.complete(x.rows, tokens), self.complete(x.scale, tokens)))
        return linear(self.complete(x, tokens))

    def row(self, values: Values, linear: Product) -> torch.Tensor:
        return torch.ops.tokasaurus.scatter_sums(linear(values), self.size, self.group)

    def select(self, x: torch.Tensor, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        own = keep - self.rank * self.rows(tokens)
        elsewhere = (own < 0) | (own >= x.shape[0])
        # One rank has the row and the others give zeros, so that the sum is the row.
        rows = x.index_select(0, own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(1), 0)
        torch.ops.tokasaurus.all_reduce_(rows, self.group)
        return rows

    @property
    def kept(self) -> Exchange:
        return self._reduced

    def complete(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        return torch.ops.tokasaurus.gather_rows(x, tokens, self.size, self.group)


ALONE = Alone()


class Exchanges(NamedTuple):
    """Which strategy a step of so many tokens takes; all ranks of a replica choose alike."""

    few: Exchange
    many: Exchange
    fewest_many: int  # tokens

    def of(self, tokens: int) -> Exchange:
        """For a forward pass over ``tokens`` tokens."""
        return self.many if tokens >= self.fewest_many else self.few


def make_exchanges(ranks: Ranks, fewest_sharded: int | None = None) -> Exchanges:
    """``fewest_sharded``: tokens from which on they are sharded; None = the usual number."""
    if ranks.tp_size == 1:
        return Exchanges(ALONE, ALONE, 0)
    sharded = SequenceSharded(ranks.tp_rank, ranks.tp_size)
    return Exchanges(AllReduce(), sharded, FEWEST_SHARDED if fewest_sharded is None else fewest_sharded)
