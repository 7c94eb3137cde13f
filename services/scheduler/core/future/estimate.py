"""Estimates the start and finish step of requests from the forecast and the expected lengths of their answers."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.future.admission import running_curve
from services.scheduler.core.request import Request, Sample
from services.scheduler.core.state import State

# Waiting samples that are placed one by one. Further samples are assumed to start at the same rate.
_PLACED = 512
_MOST_READ = 4096  # waiting samples that are read; only the number of further samples is used
_MOST_CELLS = 4 * 1024 * 1024  # entries of the forecast that are read for all samples, as the step loop waits meanwhile


class Estimate(NamedTuple):
    """Start and finish of a request, in steps from now."""

    start: int  # first token
    finish: int  # last token
    curve: np.ndarray  # int64, pages in use at steps 0, 1, ..., with the request and the samples before it
    ends: np.ndarray  # int64 [n], last tokens of its samples, ascending; 0 for finished samples


def steps_until_released(state: State, count: int) -> int:
    """Return the step at which ``count`` sequences will have finished, if as many start as finish."""
    active = np.flatnonzero(state.pool.slots.active)
    rounds, rest = divmod(count - 1, len(active))
    ends = np.sort(np.maximum(state.pool.slots.end_step[active] - state.pool.step, 1))
    return int(rounds * ends[-1] + ends[rest])


def estimate(state: State, subject: Request) -> Estimate:
    """Return when ``subject`` starts and finishes, with the queue placed behind the running sequences.

    ``subject`` may be queued, running, or not submitted. In the last case it is placed behind all requests of its class
    and of higher classes.
    """
    start, running = _of_running(state, subject)
    ends = running.tolist()
    queue, left_out = _before(state, subject)
    if queue and queue[-1].request is subject:
        placement = Placement(state)
        for sample, first, last in placement.place(queue, left_out):
            if sample.request is subject:
                start = first if start is None else min(start, first)
                ends.append(last)
        curve = placement.pages
    else:
        curve = running_curve(state, state.pool.step)
    ordered = np.sort(np.array([0] * (subject.n - len(ends)) + ends, np.int64))
    return Estimate(start or 0, int(ordered[-1]), curve, ordered)


def _before(state: State, subject: Request) -> tuple[list[Sample], int]:
    """Return the waiting samples up to the last of ``subject``, in the order of service.

    The number is that of the samples of a long queue that are missing before the last samples of ``subject``.
    """
    waiting = state.in_order(_MOST_READ)
    if subject.samples:
        mine = [sample for sample in subject.samples if sample.slot < 0 and not sample.finished]
        within = [index for index, sample in enumerate(waiting) if sample.request is subject]
        if len(within) == len(mine):
            return waiting[: within[-1] + 1] if within else [], 0
        mine = mine[len(within) :]
    else:
        mine = [Sample(subject, index, 0, 0) for index in range(subject.n)]
        waiting = [
            sample for sample in waiting if sample.request.priority <= subject.priority and not sample.request.parked
        ]
    others = len(state.queue.waiting) - (0 if subject.parked else state.queue.waiting.parked)
    return waiting + mine, max(0, others - _MOST_READ - len(mine))


def _expected(state: State, samples: list[Sample]) -> npt.NDArray[np.int64]:
    """Return the tokens that waiting samples are expected to generate from now on: int64."""
    rows = [(s.request.length_class_id, s.given - s.request.prompt_tokens, s.request.limit - s.request.prompt_tokens)
            for s in samples]  # fmt: skip
    classes, ages, limits = np.array(rows, np.int64).T
    expected: npt.NDArray[np.int64] = np.maximum(
        np.ceil(state.queue.lengths.mean(classes, ages, limits)).astype(np.int64) - ages, 1
    )
    return expected


def running_steps(state: State, chosen: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the steps of the first and the last token of the sequences in the slots ``chosen``: int64 each."""
    slots, known, given = state.pool.slots, state.pool.slots.known[chosen], state.pool.slots.given[chosen]
    to_prefill = np.maximum(given - slots.scheduled[chosen], 0)
    first = np.where(known > given, 0, 1 + to_prefill // state.pool.shape.max_tokens_per_step)
    return first, first + np.maximum(slots.total[chosen] - known, 0)


def _of_running(state: State, subject: Request) -> tuple[int | None, npt.NDArray[np.int64]]:
    """Return the start of the samples of ``subject`` that run or have finished, and the ends of those that run."""
    own = [sample.slot for sample in subject.samples if sample.slot >= 0 and not sample.finished]
    first, last = running_steps(state, np.array(own, np.int64))
    starts = [0] * any(sample.finished for sample in subject.samples) + first.tolist()
    return min(starts, default=None), last


class Placement:
    """Pages and slots in use at steps 0, 1, ..., by the running sequences and the samples placed so far."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.pages = running_curve(state, state.pool.step)
        ends = np.clip((state.pool.slots.end_step - state.pool.step)[state.pool.slots.active], 0, len(self.pages))
        ended = np.cumsum(np.bincount(ends, minlength=len(self.pages) + 1))[: len(self.pages)]
        self._slots = state.pool.slots.running - ended

    def place(self, queue: list[Sample], left_out: int = 0) -> Iterator[tuple[Sample, int, int]]:
        """Yield each sample of ``queue`` with the steps of its first and its last token.

        ``queue`` is in the order of service. ``left_out`` is the number of samples that it lacks.
        """
        state, shape = self._state, self._state.pool.shape
        prefill = state.pool.tokens_to_prefill()
        at, cells, placed = 0, 0, 0
        lengths = _expected(state, queue)
        for index, (sample, length) in enumerate(zip(queue, lengths.tolist(), strict=True)):
            prefill += self._to_prefill(sample, queue[index - 1] if index else None)
            if index < _PLACED and cells < _MOST_CELLS:
                cells += len(self.pages)
                needed = -(-(sample.given + length - 1) // shape.page_size)
                if shape.window_tokens:
                    needed = min(needed, max(-(-sample.given // shape.page_size), shape.window_pages))
                at = self.first_fit(at, needed, length)
                at = max(at, prefill // shape.max_tokens_per_step)
                self._add(at, length, needed)
                begins, placed = at, index + 1
            else:
                begins = max(at * (index + 1 + left_out) // placed, prefill // shape.max_tokens_per_step)
            begins += max(1, -(-sample.given // shape.max_tokens_per_step))
            yield sample, begins, begins + length - 1

    def _to_prefill(self, sample: Sample, before: Sample | None) -> int:
        """Return the tokens to compute before a sample decodes. Samples of a request share their prompt."""
        return 1 if before is not None and before.request is sample.request else sample.given

    def first_fit(self, at: int, needed: int, length: int) -> int:
        """Return the first step from ``at`` on after which ``needed`` pages and a slot stay free."""
        self._extend(at + length)
        total, most = self._state.pool.pages.size, self._state.pool.shape.max_running
        full = np.flatnonzero((self.pages[at:] + needed > total) | (self._slots[at:] >= most))
        return at if len(full) == 0 else at + int(full[-1]) + 1

    def _add(self, at: int, length: int, needed: int) -> None:
        self._extend(at + length + 1)
        self.pages[at : at + length] += needed
        self._slots[at : at + length] += 1

    def _extend(self, length: int) -> None:
        missing = length + 1 - len(self.pages)
        if missing > 0:
            self.pages = np.concatenate((self.pages, np.full(missing, self.pages[-1])))
            self._slots = np.concatenate((self._slots, np.full(missing, self._slots[-1])))
