"""State of the running sequences, as arrays over the slots of the worker."""

import numpy as np

from services.common.plan.types import WorkerLimits
from services.scheduler.core.request import Sample


class Slots:
    """Columns with an entry for each slot. Owned by the core.

    Lengths are in tokens. Entries of free slots are undefined.
    """

    def __init__(self, shape: WorkerLimits) -> None:
        count = shape.max_slots
        self.active = np.zeros(count, bool)
        self.admitted_step = np.zeros(count, np.int64)  # results of earlier steps belong to a previous sequence
        self.prompt = np.zeros(count, np.int64)  # tokens of the prompt, without a resumed tail
        self.given = np.zeros(count, np.int64)  # tokens known at admission, which are prefilled
        self.scheduled = np.zeros(count, np.int64)  # tokens computed after all plans that were built
        self.known = np.zeros(count, np.int64)  # tokens given and sampled
        self.limit = np.zeros(count, np.int64)  # greatest length
        self.min_known = np.zeros(count, np.int64)  # least length at which stop tokens and strings count
        self.total = np.zeros(count, np.int64)  # final length: the limit if guaranteed, otherwise predicted
        self.end_step = np.zeros(count, np.int64)  # step whose plan releases it at the latest, if it ends at ``total``
        self.priority = np.zeros(count, np.int64)
        self.guaranteed = np.zeros(count, bool)
        self.preemptible = np.zeros(count, bool)  # may be preempted for higher classes
        self.parked = np.zeros(count, bool)  # preempted for any sample that is not parked
        self.tail = np.zeros(count, bool)  # in the tail of its group, see ``Request.in_tail``
        self.protected_until = np.zeros(count, np.int64)  # known tokens from which it may be preempted for other keys
        self.accepted_ns = np.zeros(count, np.int64)
        self.length_class = np.zeros(count, np.int64)
        self.observed_age = np.zeros(count, np.int64)  # generated tokens when the length predictor last observed it
        self.quantile = np.zeros(count, np.float64)  # quantile of its class from which its length is predicted
        self.delay = np.zeros(count, np.int64)  # least number of steps until its prompt is computed
        # Pages: those of its path in the prefix tree, then its own. The first ones are not held any more if no layer
        # attends to them. If these are the whole path, ``node`` is the root.
        self.page_count = np.zeros(count, np.int64)
        self.left_behind = np.zeros(count, np.int64)  # leading entries of the page table that are not held
        self.table = np.zeros((count, -(-shape.max_context_tokens // shape.page_size) + 1), np.int32)
        self.node = np.zeros(count, np.int64)
        self.cache_epoch = np.zeros(count, np.int64)  # epoch of the prefix tree when it was admitted
        self.lent_pages = np.zeros(count, np.int64)  # leading pages that are kept for waiting samples of its request
        # Known tokens, because pages that are not held any more may have others. Memory is used where it is written.
        self.tokens = np.zeros((count, shape.max_context_tokens if shape.window_tokens else 0), np.uint32)
        self.last_token = np.zeros(count, np.uint32)
        self.stop_state = np.full(count, -1, np.int32)  # global state of the stop automaton; -1 = no stop strings
        self.routed = np.full(count, -1)  # position of the next token whose experts are wanted; -1 = not asked
        self.stop_set = np.zeros(count, np.int32)
        self.key = np.zeros(count, np.int64)  # number of the fairness key in ``Pool.running_keys``
        self.sink = np.zeros(count, np.int64)
        self.handle = np.zeros(count, np.uint32)
        self.first_token_ns = np.zeros(count, np.int64)  # 0 = none yet
        self.last_token_ns = np.zeros(count, np.int64)
        self.samples = np.full(count, None, object)
        self._free = np.arange(count - 1, -1, -1)
        self._free_count = count
        self._running_slots: np.ndarray | None = None  # active slots; None after a change of ``active``

    @property
    def running(self) -> int:
        """The number of running sequences."""
        return len(self.active) - self._free_count

    def running_slots(self) -> np.ndarray:
        """Return the active slots, ascending: int64 ``[running]``, read-only.

        The array is cached, because the search takes long if few of thousands of slots are active.
        """
        if self._running_slots is None:
            self._running_slots = np.flatnonzero(self.active)
        return self._running_slots

    def take(self, count: int) -> np.ndarray:
        """Return ``count`` free slots, int64, which are active from now on."""
        self._free_count -= count
        taken = self._free[self._free_count : self._free_count + count].copy()
        self.active[taken] = True
        self._running_slots = None
        return taken

    def give(self, slots: np.ndarray) -> None:
        """Release slots. A plan releases slots before it admits, so the plan that releases a slot may reuse it."""
        self.active[slots] = False
        self._running_slots = None
        self.samples[slots] = None
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def running_samples(self) -> list[Sample]:
        """Return the samples that have a slot, by slot."""
        running: list[Sample] = self.samples[self.active].tolist()
        return running

    def pages(self, slot: int) -> np.ndarray:
        """Return the page table of a sequence: int32 ``[page_count]``, a view."""
        return self.table[slot, : self.page_count[slot]]

    def entries(self, slots: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the entries ``first[i]`` to ``end[i]`` - 1 of the page tables of ``slots``: int32, by slot."""
        columns = np.arange(end.max(initial=0))
        entries: np.ndarray = self.table[slots, : len(columns)][(columns >= first[:, None]) & (columns < end[:, None])]
        return entries

    def decoding(self) -> np.ndarray:
        """Return the slots that compute one more token in the next plan, ascending: int64, read-only."""
        running = self.running_slots()
        scheduled = self.scheduled[running]
        more = (scheduled >= self.given[running]) & (scheduled < self.limit[running] - 1)
        return running if more.all() else running[more]

    def outstanding_tokens(self) -> int:
        """Return the tokens left to prefill, and left to generate at most, of all sequences that are not parked."""
        active = self.running_slots()
        active = active[~self.parked[active]]
        prefill = np.maximum(self.given[active] - self.scheduled[active], 0).sum()
        return int(prefill + (self.limit[active] - self.known[active]).sum())
