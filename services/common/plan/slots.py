"""The lengths and page tables of a worker's slots, which plans are judged by and change."""

import numpy as np

from services.common.plan.types import Admission, WorkerLimits


class SlotState:
    """Arrays over slots. Owned by its caller; used by one thread at a time.

    ``known`` counts a sequence's tokens, including the one sampled last. ``computed`` counts those whose keys and
    values are in the cache, ``given`` those that came with the admission. So a sequence that decodes has
    ``computed == known - 1``.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        slots = limits.max_slots
        self.used = np.zeros(slots, bool)
        self.known, self.computed, self.given, self.page_counts = np.zeros((4, slots), np.int64)
        self.page_table = np.zeros((slots, limits.max_pages_per_slot), np.int32)

    def release(self, slots: np.ndarray) -> None:
        """Free ``slots [n]``, which are in use."""
        self.used[slots] = False
        self.known[slots] = self.computed[slots] = self.given[slots] = self.page_counts[slots] = 0

    def admit(self, admission: Admission) -> None:
        """Put a sequence into its slot, which is free."""
        slot = admission.slot
        self.used[slot] = True
        self.known[slot] = self.given[slot] = len(admission.token_ids)
        self.computed[slot] = admission.cached_tokens
        self.page_counts[slot] = len(admission.pages)
        self.page_table[slot, : len(admission.pages)] = admission.pages

    def append_pages(self, slots: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Append ``pages[i]`` to the table of ``slots[i]``, where a slot may occur more than once.

        Returns the position of each page in its table, ``[n]`` int64.
        """
        places: np.ndarray = self.page_counts[slots]
        np.add.at(self.page_counts, slots, 1)
        if (self.page_counts[slots] - places > 1).any():  # rare: a sequence that grows by several pages at once
            order = np.argsort(slots, kind="stable")
            for second in np.flatnonzero(np.diff(slots[order]) == 0).tolist():
                places[order[second + 1]] = places[order[second]] + 1
        self.page_table[slots, places] = pages
        return places

    def pages(self, slot: int) -> np.ndarray:
        """Return the page table of ``slot``, ``[n]`` int32."""
        return self.page_table[slot, : self.page_counts[slot]]
