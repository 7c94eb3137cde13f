"""Strategies by which the ranks of a stage exchange activations around the matrix products of a layer.

A strategy is chosen for each step and passed to the model's ``forward``, which is compiled once for each. It performs a
product together with its collective, so that a strategy can overlap them. In this module, ``tokens`` is the number of
tokens of the step, and the *rows* of a rank are its part of the residual stream, one row for each token.
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

# Name for operators of the group of this process's stage.
TENSOR_RANKS = "tensor"
# Both are measured on two H200 with ``bench.links``. From this many bytes of rows on, the norms and sums that sharding
# saves outweigh its second collective.
_SHARDED_BYTES = 64 << 20
# Up to this many bytes, reading the memory of the other ranks is faster than a collective of NCCL.
_PEER_SUM_BYTES = 256 << 10

Values = torch.Tensor | Quantized
Product = Callable[[Values], torch.Tensor]
Given = TypeVar("Given", bound=Values)


class Exchange(nn.Module, ABC):
    """A strategy of exchange. It has no state, and is a module so that compilers treat its attributes as constants."""

    size: int  # number of ranks
    shares_rows: bool  # whether each rank has a part of the rows only

    @abstractmethod
    def rows(self, tokens: int) -> int:
        """Return the number of rows of a rank."""

    @abstractmethod
    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        """Return ``linear`` of all tokens, ``[tokens, this rank's outputs]``, from this rank's ``x [rows, inputs]``."""

    @abstractmethod
    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        """Return this rank's rows of the sum over the ranks of ``linear(values)``, ``[rows, outputs]``.

        ``values`` is ``[tokens, this rank's inputs]``.
        """

    @abstractmethod
    def select(
        self, x: torch.Tensor, keep: torch.Tensor, tokens: int, values: Values, linear: Product
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows ``[samples, size]`` of the tokens ``keep [samples]``, on every rank.

        ``x`` is this rank's rows. Also return the sum over the ranks of ``linear(values)`` with ``values [samples, this
        rank's inputs]``, or None if the rows include it. The following products use the strategy ``kept``.
        """

    @property
    @abstractmethod
    def kept(self) -> "Exchange":
        """The strategy for the tokens that ``select`` has selected."""

    @abstractmethod
    def complete(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the rows of all tokens, ``[tokens, size]``, from this rank's rows ``x``."""

    @abstractmethod
    def selected(self, x: torch.Tensor, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the rows ``[samples, size]`` of the tokens ``keep [samples]``, on every rank."""

    @abstractmethod
    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of ``x``, a tensor of any shape, which may be changed in place."""


class Alone(Exchange):
    """The strategy of a single rank, which exchanges nothing."""

    size, shares_rows = 1, False

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

    def selected(self, x: torch.Tensor, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        return x.index_select(0, keep)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x


class AllReduce(Alone):
    """Every rank has all rows, and an all-reduce sums the partial products (Shoeybi et al. 2019)."""

    def __init__(self, size: int, group: str = TENSOR_RANKS) -> None:
        super().__init__()
        self.size, self.group = size, group

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        return self.total(linear(values))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.tokasaurus.all_reduce_(x, self.group)
        return x


class PeerSum(AllReduce):
    """``AllReduce`` by reading the memory of other ranks, which takes half the time for small sums."""

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = torch.ops.tokasaurus.sum_of_peers(linear(values), self.group)
        return total


class SequenceSharded(Exchange):
    """Every rank has an equal share of the rows, and computes norms and sums of these (Korthikanti et al. 2022).

    The last rank may have fewer tokens. Its other rows are zeros.
    """

    shares_rows = True

    def __init__(self, rank: int, size: int, group: str = TENSOR_RANKS) -> None:
        super().__init__()
        self.rank, self.size, self.group = rank, size, group
        self._reduced = AllReduce(size, group)

    def rows(self, tokens: int) -> int:
        return rows_each(tokens, self.size)

    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        if isinstance(x, Quantized):  # half the bytes of the unquantized rows
            return linear(Quantized(*torch.ops.tokasaurus.gather_quantized(*x, tokens, self.size, self.group)))
        return linear(self.complete(x, tokens))

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        own: torch.Tensor = torch.ops.tokasaurus.scatter_sums(linear(values), self.size, self.group)
        return own

    def select(
        self, x: torch.Tensor, keep: torch.Tensor, tokens: int, values: Values, linear: Product
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # One rank adds the row and the others add zeros, so the sum of products includes it without another collective.
        return self.total(linear(values) + self._own(x, keep, tokens)), None

    def selected(self, x: torch.Tensor, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        return self.total(self._own(x, keep, tokens))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced.total(x)

    def _own(self, x: torch.Tensor, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the rows of the tokens ``keep [samples]``, and zeros for those of other ranks."""
        own = keep - self.rank * self.rows(tokens)
        elsewhere = (own < 0) | (own >= x.shape[0])
        return x.index_select(0, own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(1), 0)

    @property
    def kept(self) -> Exchange:
        return self._reduced

    def complete(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        whole: torch.Tensor = torch.ops.tokasaurus.gather_rows(x, tokens, self.size, self.group)
        return whole


class Overlapped(SequenceSharded):
    """``SequenceSharded`` in which products overlap with the exchange of their inputs and outputs ("async TP").

    It requires ranks that read each other's memory. Products that are not a plain ``Linear``, such as those in fp8, do
    not overlap.
    """

    def column(self, x: Values, linear: Product, tokens: int) -> torch.Tensor:
        if not isinstance(linear, Linear):
            return super().column(x, linear, tokens)
        product: torch.Tensor = torch.ops.tokasaurus.gather_product(x, linear.matrix, self.size, self.group)[:tokens]
        return product if linear.bias is None else product + linear.bias

    def row(self, values: Given, linear: Callable[[Given], torch.Tensor]) -> torch.Tensor:
        # The product has no bias: models with such a bias are refused.
        if not isinstance(linear, Linear) or values.shape[0] % self.size:  # type: ignore[union-attr]  # it takes tensors
            return super().row(values, linear)
        own: torch.Tensor = torch.ops.tokasaurus.product_sums(values, linear.matrix, self.size, self.group)
        return own


ALONE = Alone()


class Exchanges(NamedTuple):
    """The strategies of a replica by the number of tokens. They are equal on all ranks."""

    strategies: tuple[Exchange, ...]  # in ascending order of tokens
    begins: tuple[int, ...] = ()  # smallest token count of the second strategy, the third, ...

    def of(self, tokens: int) -> Exchange:
        """Return the strategy for a forward pass over ``tokens`` tokens."""
        return self.strategies[bisect_right(self.begins, tokens)]


def fewest_sharded(row_bytes: int) -> int:
    """Return the smallest token count for which rows of ``row_bytes`` bytes are sharded."""
    return max(1, _SHARDED_BYTES // row_bytes)


def make_exchanges(
    ranks: Ranks, row_bytes: int, *, shares_memory: bool = False, fewest_overlapped: int | None = None
) -> Exchanges:
    """Return the strategies for rows of ``row_bytes`` bytes.

    ``shares_memory``: ranks can read each other's memory. ``fewest_overlapped``: smallest token count for which
    products overlap; None = never.
    """
    if ranks.tp_size == 1:
        return Exchanges((ALONE,))
    rank = ranks.tp_rank, ranks.tp_size
    size = ranks.tp_size
    choices: list[tuple[int, Exchange]] = [(0, AllReduce(size)), (fewest_sharded(row_bytes), SequenceSharded(*rank))]
    if shares_memory:
        choices = [(0, PeerSum(size)), (1 + _PEER_SUM_BYTES // row_bytes, AllReduce(size)), choices[1]]
    if fewest_overlapped is not None:
        choices.append((fewest_overlapped, Overlapped(*rank)))
    # A strategy replaces each earlier strategy that begins at the same token count or later.
    kept = [each for index, each in enumerate(choices) if all(each[0] < begin for begin, _ in choices[index + 1 :])]
    begins, strategies = zip(*kept, strict=True)
    return Exchanges(strategies, begins[1:])
