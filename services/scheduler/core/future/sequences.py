"""Running sequences and candidates as the forecast needs them, and the steps at which they take and release pages."""

from typing import NamedTuple

import numpy as np

from services.common.plan.types import WorkerLimits
from services.scheduler.core.memory.slots import Slots

FAR = np.iinfo(np.int64).max // 2  # an unknown end


class Sequences(NamedTuple):
    """Sequences that run, or candidates for admission. Columns are int64 ``[sequences]``."""

    length: np.ndarray  # tokens computed, at least the tokens known at admission
    limit: np.ndarray  # greatest length; the last token is sampled and never computed
    pages: np.ndarray  # length of its page table at step 0
    delay: np.ndarray  # it decodes from step ``delay + 1`` on at the earliest
    latest_delay: np.ndarray  # it decodes from step ``latest_delay + 1`` on at the latest
    end: np.ndarray  # step that releases its pages
    node: np.ndarray  # its node of the prefix tree, with its first ``depth[node]`` pages; the others are its own
    lent: np.ndarray  # number of leading pages that are kept after its end; it leaves no page behind if there are any
    left_behind: np.ndarray  # number of leading pages that it does not hold at step 0
    slot: np.ndarray  # -1 = a candidate

    def delayed(self, steps: np.ndarray | int) -> "Sequences":
        """Return the sequences if their tokens are computed ``steps`` steps later, int64 beside them or one number."""
        return self._replace(end=self.end + steps, delay=self.delay + steps, latest_delay=self.latest_delay + steps)

    def take(self, indices: np.ndarray) -> "Sequences":
        """Return the sequences at ``indices``."""
        return Sequences(*(values[indices] for values in self))


def running_sequences(slots: Slots, step: int, steps_ahead: int, without: np.ndarray | None = None) -> Sequences:
    """Return the running sequences as of the plan ``step``, except those in the slots ``without``.

    ``steps_ahead`` is the limit of plans in flight.
    """
    active = slots.running_slots()
    if without is not None:
        active = np.setdiff1d(active, without, assume_unique=True)
    length = np.maximum(slots.scheduled[active], slots.given[active])
    end, delay = slots.end_step[active] - step, slots.delay[active]
    latest = np.where(delay > 0, end - (slots.total[active] - 1 - slots.given[active]) - steps_ahead, 0)
    return Sequences(length, slots.limit[active], slots.page_count[active], delay, np.maximum(latest, delay),
                     np.maximum(end, 1), slots.node[active], slots.lent_pages[active], slots.left_behind[active],
                     active)  # fmt: skip


def growth(sequences: Sequences, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (first, count) of the pages that sequences will take: int64 ``[sequences]`` each.

    A sequence takes ``count`` pages, the first at step ``first`` and then one every ``page_size`` steps.
    """
    length, delay = sequences.length, sequences.delay
    first = delay + 1 + -length % page_size
    longest = np.minimum(sequences.limit - 1, length + np.maximum(sequences.end - 1 - delay, 0))
    return first, np.maximum(-(-longest // page_size) - sequences.pages, 0)


class Leaving(NamedTuple):
    """The times at which sequences leave pages behind. Columns are int64 ``[sequences]``."""

    first: np.ndarray  # first step at which pages are left behind
    at_once: np.ndarray  # number of leading pages that are left behind at that step
    end: np.ndarray  # number of leading pages that are left behind before the sequence ends
    length: np.ndarray
    window: int  # tokens
    page_size: int

    def take(self, indices: np.ndarray) -> "Leaving":
        """Return the rows at ``indices``."""
        return self._replace(
            first=self.first[indices], at_once=self.at_once[indices], end=self.end[indices], length=self.length[indices]
        )

    def step(self, page: np.ndarray) -> np.ndarray:
        """Return the step at which each sequence leaves behind entry ``page`` of its page table: int64."""
        computed = (page + 1) * self.page_size + self.window - 1
        step: np.ndarray = self.first + np.maximum(computed - self.length, 0)
        return step


def leaving_of(sequences: Sequences, limits: WorkerLimits) -> Leaving:
    """Return the times at which ``sequences`` leave pages behind before they end, if the worker has a window."""
    length, first = sequences.length, np.where(sequences.lent > 0, FAR, sequences.latest_delay) + 1
    # Tokens that are computed when the plan of step ``end - 1`` is built, which is the last before the end.
    computed = np.minimum(sequences.limit - 1, length + sequences.end - 1 - first)
    end = np.where(first < sequences.end, limits.pages_left_behind(np.maximum(computed, 0)), 0)
    return Leaving(first, limits.pages_left_behind(length), end, length, limits.window_tokens, limits.page_size)
