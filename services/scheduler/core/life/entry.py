"""Samples that are admitted together, and the values that they put into slots."""

from typing import NamedTuple

import numpy as np

from services.scheduler.core.request import Sample


class Entry(NamedTuple):
    """Samples that are admitted together: the siblings of one request, or one sample."""

    samples: list[Sample]
    tokens: np.ndarray  # uint32, all known tokens
    cached: int  # the first tokens, whose keys and values are computed
    node: int  # of the prefix tree: its path is the beginning of their page tables
    copied_page: int = -1  # page with the other cached tokens, which each sample copies; -1 = none
    leads: bool = False  # its siblings wait until its prompt is computed
    shared: bool = False  # siblings that have only their last token to compute

    def lent_pages(self, page_size: int) -> int:
        """Return how many leading pages siblings will need: those of all tokens but the last."""
        return -(-(len(self.tokens) - 1) // page_size) if self.leads else 0


class Placed(NamedTuple):
    """Slots of an entry."""

    slots: np.ndarray  # int64 [samples]
    tables: np.ndarray  # int32 [samples, pages], page tables


class Lengths(NamedTuple):
    """Expected ends of sequences; arrays ``[sequences]``, as the columns of the same names in ``Slots``."""

    total: np.ndarray  # int64
    quantile: np.ndarray  # float64
    end_step: np.ndarray  # int64

    def take(self, chosen: np.ndarray) -> "Lengths":
        """Return the rows ``chosen``, indices or bools."""
        return Lengths(*(column[chosen] for column in self))


class SlotColumns(NamedTuple):
    """Values that all samples of an entry have in common, named as the columns of ``Slots`` that they go to."""

    given: int
    prompt: int
    limit: int
    min_known: int
    priority: int
    scheduled: int
    length_class: int
    node: int
    sink: int
    last_token: int
    lent_pages: int
    stop_set: int
    key: int


class Prepared(NamedTuple):
    """What an entry puts into its slots."""

    columns: SlotColumns
    stop_states: list[int]  # beside its samples, as in ``Slots``
