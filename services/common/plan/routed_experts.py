"""The experts that computed the tokens of a step, as numpy arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class RoutedExpertsLayout:
    """The layout of one token's experts. Its fields are those of the message in the contract."""

    layers: int  # layers that have experts
    experts_per_token: int
    bytes_per_expert: int  # 1 or 2

    @property
    def token_bytes(self) -> int:
        """The size of a token's experts in bytes."""
        return self.layers * self.experts_per_token * self.bytes_per_expert


class RoutedExperts(NamedTuple):
    """The experts of consecutive tokens of several sequences."""

    owners: np.ndarray  # [n] int64, slots, or handles of samples
    starts: np.ndarray  # [n] int64, position in the sequence of the first token
    counts: np.ndarray  # [n] int64, tokens
    experts: np.ndarray  # [tokens, token_bytes] uint8, those of the first owner first

    @classmethod
    def join(cls, parts: "Sequence[RoutedExperts | None]") -> "RoutedExperts | None":
        """Concatenate ``parts``. Return None if all of them are None."""
        given = [part for part in parts if part is not None]
        if len(given) < 2:
            return given[0] if given else None
        return cls(*(np.concatenate(column) for column in zip(*given, strict=True)))

    @classmethod
    def read(cls, owners: np.ndarray, starts: np.ndarray, counts: np.ndarray, experts: bytes) -> "RoutedExperts":
        """Return the content of a message. ``is_consistent`` is false if the lengths of its fields disagree."""
        width, rest = divmod(len(experts), max(1, int(counts.sum())))
        rows = np.frombuffer(experts, np.uint8).reshape(-1, 1 if rest or not width else width)
        return cls(owners, starts, counts, rows)

    @property
    def is_consistent(self) -> bool:
        """True if the lengths of the arrays agree, and each sequence has tokens."""
        same = len(self.owners) == len(self.starts) == len(self.counts) > 0
        return same and bool(self.counts.all()) and len(self.experts) == self.counts.sum()

    def take(self, chosen: np.ndarray) -> "RoutedExperts | None":
        """Return the sequences of the mask ``chosen [n]`` bool, or None if there are none."""
        if chosen.all():
            return self if len(chosen) else None
        if not chosen.any():
            return None
        rows = np.repeat(chosen, self.counts)
        return RoutedExperts(self.owners[chosen], self.starts[chosen], self.counts[chosen], self.experts[rows])

    def pieces(self) -> list[tuple[int, int, np.ndarray]]:
        """Return (owner, start, experts ``[tokens, token_bytes]``) of each sequence."""
        ends = np.cumsum(self.counts)
        columns = (self.owners.tolist(), self.starts.tolist(), (ends - self.counts).tolist(), ends.tolist())
        return [(owner, start, self.experts[begin:end]) for owner, start, begin, end in zip(*columns, strict=True)]
