"""Samples that are admitted together, and the values that they put into slots."""

from typing import NamedTuple

import numpy as np

from services.scheduler.core.memory.prefix_tree import ROOT
from services.scheduler.core.request import Sample


class Entry(NamedTuple):
    """Samples that are admitted together: the siblings of one request, or one sample."""

    samples: list[Sample]
    tokens: np.ndarray  # uint32, all known tokens
    cached: int  # number of leading tokens whose keys and values are computed
    node: int  # of the prefix tree; the page tables begin with the pages of its path
    copied_page: int = -1  # page with the rest of the cached tokens, which each sample copies; -1 = none
    leads: bool = False  # the other samples of the request wait until it has computed the prompt
    shared: bool = False  # only the last token is left to compute, as another sample computed the prompt
    left_behind: int = 0  # leading pages that no sample holds, because no layer attends to them

    def held_node(self, depth: int) -> int:
        """Return ``node``, whose depth is ``depth`` pages, or the root if the samples hold no page of its path."""
        return self.node if self.left_behind < depth else ROOT

    def lent_pages(self, page_size: int) -> int:
        """Return how many leading pages the other samples will need: those of all tokens but the last."""
        return -(-(len(self.tokens) - 1) // page_size) if self.leads else 0


Placed = tuple[np.ndarray, np.ndarray]  # slots of an entry, int64 [samples], and page tables, int32 [samples, pages]


class Lengths(NamedTuple):
    """Expected ends of sequences. Arrays ``[sequences]``, named as the columns of ``Slots`` for which they are."""

    total: np.ndarray  # int64
    quantile: np.ndarray  # float64
    end_step: np.ndarray  # int64

    def take(self, chosen: np.ndarray) -> "Lengths":
        """Return the rows ``chosen``, which are indices or bools."""
        return Lengths(*(column[chosen] for column in self))


class Prepared(NamedTuple):
    """Values of an entry for its slots."""

    columns: dict[str, int]  # values that all samples share, by the column of ``Slots``
    stop_states: list[int]  # beside the samples, as in ``Slots``
