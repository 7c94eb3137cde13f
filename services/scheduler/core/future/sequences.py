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
    late: np.ndarray  # it decodes from step ``late + 1`` on at the latest
    end: np.ndarray  # step that releases its pages
    node: np.ndarray  # its node of the prefix tree, with its first ``depth[node]`` pages; the others are its own
    lent: np.ndarray  # number of leading pages that are kept after its end; it leaves no page behind if there are any
    left_behind: np.ndarray  # number of leading pages that it does not hold at step 0
    slot: np.ndarray  # -1 = a candidate

    def later(self, steps: np.ndarray | int) -> "Sequences":
        """Return the sequences if their tokens are computed ``steps`` steps later, int64 beside them or one number."""
        return self._replace(end=self.end + steps, delay=self.delay + steps, late=self.late + steps)

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
    late = np.where(delay > 0, end - (slots.total[active] - 1 - slots.given[active]) - steps_ahead, 0)
    return Sequences(length, slots.limit[active], slots.page_count[active], delay, np.maximum(late, delay),
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

    first: np.ndarray  # first step of this
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
    """Return when ``sequences`` leave pages behind before they end, if the worker has a window."""
    length, late = sequences.length, np.where(sequences.lent > 0, FAR, sequences.late)
    computed = np.minimum(sequences.limit - 1, length + sequences.end - 2 - late)  # when the last plan before is built
    end = np.where(late + 1 < sequences.end, limits.pages_left_behind(np.maximum(computed, 0)), 0)
    return Leaving(late + 1, limits.pages_left_behind(length), end, length, limits.window_tokens, limits.page_size)
