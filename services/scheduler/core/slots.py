"""State of the running sequences as a struct of arrays over the worker's slots."""

import numpy as np

from services.scheduler.core.request import Sample, WorkerShape


class Slots:
    """One entry for each slot; entries of inactive slots mean nothing. Lengths are in tokens. Owned by the core."""

    def __init__(self, shape: WorkerShape) -> None:
        count = shape.max_slots
        self.active = np.zeros(count, bool)
        self.admitted_step = np.zeros(count, np.int64)  # results of earlier steps belong to a previous occupant
        self.given = np.zeros(count, np.int64)  # known at admission: prefilled
        self.scheduled = np.zeros(count, np.int64)  # computed once every plan sent has run
        self.known = np.zeros(count, np.int64)  # given, and results received
        self.limit = np.zeros(count, np.int64)  # length at which the sequence ends
        self.min_known = np.zeros(count, np.int64)  # stops are not looked for before this length
        self.end_step = np.zeros(count, np.int64)  # step whose plan releases it when it runs to its limit
        self.delay = np.zeros(count, np.int64)  # least number of steps until its prefill is through
        self.page_count = np.zeros(count, np.int64)
        self.table = np.zeros((count, -(-shape.max_context_tokens // shape.page_size) + 1), np.int32)
        self.last_token = np.zeros(count, np.uint32)
        self.stop_state = np.full(count, -1, np.int32)  # global state of the stop automaton; -1 = no stop strings
        self.stop_set = np.zeros(count, np.int32)
        self.sink = np.zeros(count, np.int64)
        self.handle = np.zeros(count, np.uint32)
        self.first_token_ns = np.zeros(count, np.int64)  # 0 = none yet
        self.last_token_ns = np.zeros(count, np.int64)
        self.registered_pages = np.zeros(count, np.int64)  # leading pages that are nodes of the prefix tree
        self.samples: list[Sample | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def running(self) -> int:
        return len(self.samples) - len(self._free)

    def take(self) -> int:
        """A free slot."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Free a slot. Its next occupant's admission comes behind its release, in the same plan at the earliest."""
        self.active[slot] = False
        self.samples[slot] = None
        self._free.append(slot)

    def pages(self, slot: int) -> np.ndarray:
        """Page table of one sequence, a view ``[pages held]``."""
        return self.table[slot, : self.page_count[slot]]

    def decoding(self) -> np.ndarray:
        """Slots that compute one more token in the next plan."""
        more = self.scheduled < self.limit - 1
        return np.flatnonzero(self.active & (self.scheduled >= self.given) & more)

    def outstanding_tokens(self) -> int:
        """Prompt tokens to prefill and answer tokens to generate at most."""
        active = np.flatnonzero(self.active)
        prefill = np.maximum(self.given[active] - self.scheduled[active], 0).sum()
        return int(prefill + (self.limit[active] - self.known[active]).sum())
