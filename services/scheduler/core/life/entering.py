"""Who enters slots, and what the slots are filled with."""

from typing import NamedTuple

import numpy as np

from services.scheduler.core.request import Sample


class Entry(NamedTuple):
    """Samples that enter slots together: the siblings of one request, or one sample."""

    samples: list[Sample]
    tokens: np.ndarray  # uint32, all that are known
    cached: int  # so many of them are computed
    node: int  # of the prefix tree: where their page tables begin
    copied_page: int = -1  # holds the rest of the cached tokens; -1 = none
    leads: bool = False  # its siblings wait for what it computes
    shared: bool = False  # siblings: what is left to compute is their last token

    def lent_pages(self, page_size: int) -> int:
        """Leading pages that siblings will need: those of all tokens but the last."""
        return -(-(len(self.tokens) - 1) // page_size) if self.leads else 0


# For each entry its slots, int64 ``[samples]``, and their page tables, int32 ``[samples, pages]``.
Placed = list[tuple[np.ndarray, np.ndarray]]


class Lengths(NamedTuple):
    """How long sequences are taken to run; arrays ``[sequences]``."""

    total: np.ndarray  # int64, tokens when it ends
    quantile: np.ndarray  # float64, as in `Slots`
    end_step: np.ndarray  # int64, absolute


class Settings(NamedTuple):
    """What the slots of an entry are filled with."""

    shared: tuple[int, ...]  # of all its samples, as `Lifecycle.prepare` orders them
    stop_states: list[int]  # as in `Slots`
