"""How the ranks of a stage exchange a step's activations, around a layer's matrix products.

A strategy is chosen for each step and passed to the model's ``forward``; each is a variant that is compiled once. It
owns product and collective together, so that one that overlaps them fits in. ``tokens`` is everywhere the number of the
step's tokens; a rank's *rows* are what it has of the residual stream: its tokens.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from services.worker.described.ranks import Ranks
from services.worker.layers.fp8 import Quantized
from services.worker.layers.linear import Linear
from services.worker.parallel import overlap, peer_memory  # noqa: F401  their operators
from services.worker.parallel.operators import rows_each

# The ranks of this process' stage, for operators.
TENSOR_RANKS = "tensor"
# Measured on two H200 with ``bench.links``. One collective takes less than two; but where a step's rows have so many
# bytes, a rank that has a part of them saves as much in norms and sums.
_SHARDED_BYTES = 64 << 20
# Up to so many, reading each other's memory takes less than a library's collective.
_PEER_SUM_BYTES = 256 << 10

Values = torch.Tensor | Quantized
Product = Callable[[Values], torch.Tensor]
Given = TypeVar("Given", bound=Values)


class Exchange(nn.Module, ABC):
    """Without state. A module, so that compilers take its numbers for constants."""

    @abstractmethod
    def rows(self, tokens: int) -> int:
        """How many rows of the residual stream a rank has."""

    @abstractmethod
    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        """``linear`` of all tokens, ``[tokens, this rank's outputs]``, from this rank's rows ``x [rows, inputs]``."""

    @abstractmethod
    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        """The sum over the ranks of ``linear(values)``, ``values [tokens, this rank's inputs]``: this rank's rows of
        it, ``[rows, outputs]``."""

    @abstractmethod
    def select(
        self, x: torch.Tensor, keep: torch.Tensor, tokens: int, values: Values, linear: Product
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Go on with the tokens ``keep [samples]``, all of them on every rank: their rows, from this rank's rows ``x``,
        and the sum over the ranks of ``linear(values)``, ``values [samples, this rank's inputs]``; None = the rows have
        it already. From there on the strategy is ``kept``."""

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

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        return linear(values)

    def select(
        self, x: torch.Tensor, keep: torch.Tensor, tokens: int, values: Values, linear: Product
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x.index_select(0, keep), self.row(values, linear)

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

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        partial = linear(values)
        torch.ops.tokasaurus.all_reduce_(partial, self.group)
        return partial


class PeerSum(Alone):
    """As ``AllReduce``, where ranks read each other's memory: in half the time, while it is latency that counts."""

    def __init__(self, group: str = TENSOR_RANKS) -> None:
        super().__init__()
        self.group = group

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = torch.ops.tokasaurus.sum_of_peers(linear(values), self.group)
        return total


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
            return linear(Quantized(*torch.ops.tokasaurus.gather_quantized(*x, tokens, self.size, self.group)))
        return linear(self.complete(x, tokens))

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        own: torch.Tensor = torch.ops.tokasaurus.scatter_sums(linear(values), self.size, self.group)
        return own

    def select(
        self, x: torch.Tensor, keep: torch.Tensor, tokens: int, values: Values, linear: Product
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = keep - self.rank * self.rows(tokens)
        elsewhere = (own < 0) | (own >= x.shape[0])
        # One rank has the row and the others give zeros, so that it is in the sum once: one collective, not two.
        rows = x.index_select(0, own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(1), 0)
        total = linear(values) + rows
        torch.ops.tokasaurus.all_reduce_(total, self.group)
        return total, None

    @property
    def kept(self) -> Exchange:
        return self._reduced

    def complete(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        everyones: torch.Tensor = torch.ops.tokasaurus.gather_rows(x, tokens, self.size, self.group)
        return everyones


class Overlapped(SequenceSharded):
    """As ``SequenceSharded``, but products go on while what they need arrives and what they gave is sent ("async TP").

    Only where ranks read each other's memory. What is no product with a matrix as it is, such as one in fp8, exchanges
    before or after it.
    """

    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        if not isinstance(linear, Linear):
            return super().column(x, linear, tokens)
        product: torch.Tensor = torch.ops.tokasaurus.gather_product(x, linear.matrix, self.size, self.group)[:tokens]
        return product if linear.bias is None else product + linear.bias

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        # No bias: it would be one rank's alone, and such models are refused.
        if not isinstance(linear, Linear) or values.shape[0] % self.size:  # type: ignore[union-attr]  # it takes tensors
            return super().row(values, linear)
        own: torch.Tensor = torch.ops.tokasaurus.product_sums(values, linear.matrix, self.size, self.group)
        return own


ALONE = Alone()


class Exchanges(NamedTuple):
    """Which strategy a step of so many tokens takes; all ranks of a replica choose alike."""

    strategies: tuple[Exchange, ...]  # for ever more tokens
    begins: tuple[int, ...] = ()  # tokens from which on the second is taken, the third, ...

    def of(self, tokens: int) -> Exchange:
        """For a forward pass over ``tokens`` tokens."""
        return self.strategies[bisect_right(self.begins, tokens)]


def fewest_sharded(row_bytes: int) -> int:
    """Tokens from which on ranks have parts of the rows, of ``row_bytes`` bytes each."""
    return max(1, _SHARDED_BYTES // row_bytes)


def make_exchanges(
    ranks: Ranks, row_bytes: int, *, shares_memory: bool = False, fewest_overlapped: int | None = None
) -> Exchanges:
    """``row_bytes``: of one row of the residual stream. ``fewest_overlapped``: tokens from which on products overlap,
    where ranks share memory; None = never."""
    if ranks.tp_size == 1:
        return Exchanges((ALONE,))
    place = ranks.tp_rank, ranks.tp_size
    ways: list[tuple[int, Exchange]] = [(0, AllReduce()), (fewest_sharded(row_bytes), SequenceSharded(*place))]
    if shares_memory:
        ways = [(0, PeerSum()), (1 + _PEER_SUM_BYTES // row_bytes, AllReduce()), ways[1]]
    if fewest_overlapped is not None:
        ways.append((fewest_overlapped, Overlapped(*place)))
    # Later ones take the place of those that would begin with as many tokens, or more.
    ways = [each for index, each in enumerate(ways) if all(each[0] < begin for begin, _ in ways[index + 1 :])]
    begins, strategies = zip(*ways, strict=True)
    return Exchanges(strategies, begins[1:])
