"""State of the running sequences as a struct of arrays over the worker's slots."""

import numpy as np

from services.scheduler.core.request import Sample, WorkerShape


class Slots:
    """One entry for each slot; entries of inactive slots mean nothing. Lengths are in tokens. Owned by the core."""

    def __init__(self, shape: WorkerShape) -> None:
        count = shape.max_slots
        self.active = np.zeros(count, bool)
        self.admitted_step = np.zeros(count, np.int64)  # results of earlier steps belong to a previous occupant
        self.prompt = np.zeros(count, np.int64)  # tokens of the prompt proper
        self.given = np.zeros(count, np.int64)  # known at admission: prefilled
        self.scheduled = np.zeros(count, np.int64)  # computed once every plan sent has run
        self.known = np.zeros(count, np.int64)  # given, and results received
        self.limit = np.zeros(count, np.int64)  # length at which the sequence ends at the latest
        self.min_known = np.zeros(count, np.int64)  # stops are not looked for before this length
        self.total = np.zeros(count, np.int64)  # length at which it will end: its limit if guaranteed, else predicted
        # Step whose plan releases it then, at the latest.
        self.end_step = np.zeros(count, np.int64)
        self.priority = np.zeros(count, np.int64)
        self.guaranteed = np.zeros(count, bool)
        self.yields = np.zeros(count, bool)  # makes way for higher classes
        self.firm_until = np.zeros(count, np.int64)  # known tokens; with fewer it does not make way for other keys
        self.accepted_ns = np.zeros(count, np.int64)
        self.length_class = np.zeros(count, np.int64)
        self.looked_at = np.zeros(count, np.int64)  # tokens generated when the predictor looked at it last
        self.quantile = np.zeros(count, np.float64)  # which part of its class's lengths it stands for
        self.delay = np.zeros(count, np.int64)  # least number of steps until its prefill is through
        # Pages: those of its node of the prefix tree and of all nodes above, then its own.
        self.page_count = np.zeros(count, np.int64)
        self.table = np.zeros((count, -(-shape.max_context_tokens // shape.page_size) + 1), np.int32)
        self.node = np.zeros(count, np.int64)
        self.lent_pages = np.zeros(count, np.int64)  # leading pages that its waiting siblings need beyond its end
        self.last_token = np.zeros(count, np.uint32)
        self.stop_state = np.full(count, -1, np.int32)  # global state of the stop automaton; -1 = no stop strings
        self.stop_set = np.zeros(count, np.int32)
        self.key = np.zeros(count, np.int64)  # number of the fairness key, of `RunningKeys`
        self.sink = np.zeros(count, np.int64)
        self.handle = np.zeros(count, np.uint32)
        self.first_token_ns = np.zeros(count, np.int64)  # 0 = none yet
        self.last_token_ns = np.zeros(count, np.int64)
        self.samples = np.full(count, None, object)
        self._free = np.arange(count - 1, -1, -1)
        self._free_count = count
        self._running_slots: np.ndarray | None = None  # as of the last change of `active`

    @property
    def running(self) -> int:
        return len(self.active) - self._free_count

    def running_slots(self) -> np.ndarray:
        """Active slots, ascending: int64 ``[running]``, not to be written to. Looked for once between two changes: with
        a few sequences in thousands of slots this is most of a step's work."""
        if self._running_slots is None:
            self._running_slots = np.flatnonzero(self.active)
        return self._running_slots

    def take(self, count: int) -> np.ndarray:
        """Free slots: int64 ``[count]``."""
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy()

    def activate(self, slots: np.ndarray) -> None:
        """Slots taken before have an occupant from here on."""
        self.active[slots] = True
        self._running_slots = None

    def give(self, slots: np.ndarray) -> None:
        """Free slots. Their next occupants' admission comes behind their release, in the same plan at the earliest."""
        self.active[slots] = False
        self._running_slots = None
        self.samples[slots] = None
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def running_samples(self) -> list[Sample]:
        running: list[Sample] = self.samples[self.active].tolist()
        return running

    def pages(self, slot: int) -> np.ndarray:
        """Page table of one sequence, a view ``[pages held]``."""
        return self.table[slot, : self.page_count[slot]]

    def decoding(self) -> np.ndarray:
        """Slots that compute one more token in the next plan, ascending; not to be written to."""
        running = self.running_slots()
        scheduled = self.scheduled[running]
        more = (scheduled >= self.given[running]) & (scheduled < self.limit[running] - 1)
        return running if more.all() else running[more]

    def outstanding_tokens(self) -> int:
        """Prompt tokens to prefill and answer tokens to generate at most."""
        active = self.running_slots()
        prefill = np.maximum(self.given[active] - self.scheduled[active], 0).sum()
        return int(prefill + (self.limit[active] - self.known[active]).sum())
