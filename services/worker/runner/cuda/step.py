"""A launched step and its results."""

from typing import NamedTuple

import numpy as np
import torch

from services.common.plan.result import ScoredTokens, Timing
from services.common.plan.routed_experts import RoutedExperts
from services.common.plan.types import Plan
from services.worker.runner.cuda.ring import Place
from services.worker.runner.cuda.scores import StepScores
from services.worker.runner.routed_experts import RoutedRuns
from services.worker.sampling.outcome import collect
from services.worker.sampling.rows import SampleRows
from services.worker.step.output import NOTHING_SAMPLED, Failure, Sampled, StepOutput

_NS_PER_MS = 1_000_000


class Era:
    """The failures between two resets. Owned by the answering thread."""

    def __init__(self, max_slots: int) -> None:
        self.failed = np.zeros(max_slots, bool)  # logits were not numbers in some step: the cached values are invalid


class StepRouted(NamedTuple):
    """The experts that the result of a step carries."""

    runs: RoutedRuns
    experts: torch.Tensor  # [tokens, token_bytes] uint8


class CudaStep:
    """A launched step. Made by the compute thread. One thread calls ``result`` once for each step, in order."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        era: Era,
        slots: np.ndarray,
        rows: SampleRows | None = None,
        extras: tuple[torch.Tensor | None, ...] = (),
        order: np.ndarray | None = None,
        scores: StepScores | None = None,
        failures: dict[int, Failure] | None = None,
        routed: StepRouted | None = None,
    ) -> None:
        """Make a step with the results of ``slots [samples]`` int64, in this order.

        ``rows`` and ``extras``: settings of the rows, and the results except tokens, in pinned memory. ``order
        [samples]`` int64: indices of the samples in batch order; None = same order. ``scores``: of prompts, on the
        host. ``failures``: of grammars, by slot. ``routed``: on the host.
        """
        self.timing = Timing()
        self.scored: tuple[ScoredTokens, ...] = ()  # set by ``read``
        self.place = place
        self._plan, self._era = plan, era
        self._slots, self._rows, self._extras, self._order = slots, rows, extras, order
        self._scores, self.failures, self._routed = scores, failures or {}, routed

    def result(self) -> StepOutput:
        """Wait for the device, without Python's global lock, and return the output. Raises the error of the device."""
        try:
            return StepOutput(self._plan.step, self.read(), self.timing, self.scored, self.failures, self.routed)
        finally:
            self.place.taken.set()

    @property
    def routed(self) -> RoutedExperts | None:
        """The experts that the result carries. Valid after ``read``."""
        return None if self._routed is None else self._routed.runs.with_experts(self._routed.experts)

    def read(self) -> Sampled:
        """Wait for the device and return the samples, without freeing the place."""
        place, slots, failed = self.place, self._slots, self._era.failed
        try:
            place.wait()
            tokens = place.tokens[: len(slots)].astype(np.int64)
            self._measure()
        except BaseException as error:
            place.ring.fail(error)
            raise
        if self._plan.releases.size:
            failed[self._plan.releases] = False
        if self._scores is not None:
            self.scored = self._scores.collect(failed)
        if not len(slots):
            return NOTHING_SAMPLED
        failed[list(self.failures)] = True
        finite = (tokens >= 0) & ~failed[slots]
        if not finite.all():
            failed[slots[~finite]] = True
        sampled = collect(slots, tokens, finite, self._rows, *self._extras)
        return sampled if self._order is None else sampled[self._order]

    def _measure(self) -> None:
        place, timing = self.place, self.timing
        timing.device = _ns(place.started, place.ended)
        timing.forward = timing.device  # includes sampling if the step is one graph
        if place.forwarded is not None:
            timing.forward = _ns(place.started, place.forwarded)
        timing.sample = timing.device - timing.forward
        if place.previous_end is not None:
            timing.idle = max(0, _ns(place.previous_end, place.started))


class CutStep:
    """A launched step of several micro-batches, used like ``CudaStep``."""

    def __init__(self, step: int, parts: list[CudaStep]) -> None:
        """``parts`` in batch order, at least one."""
        self.timing = Timing()
        self._step, self._parts = step, parts

    def result(self) -> StepOutput:
        """Wait for all micro-batches, and return the output of the step. Raises the error of the device."""
        parts, timing = self._parts, self.timing
        try:
            sampled = [found for part in parts if len((found := part.read()).slots)]
            timing.device = _ns(parts[0].place.started, parts[-1].place.ended)
        finally:
            for part in parts:
                part.place.taken.set()
        timing.idle = parts[0].timing.idle
        for part in parts:
            timing.forward += part.timing.forward
            timing.sample += part.timing.sample
        scored = tuple(each for part in parts for each in part.scored)
        failures = {slot: failure for part in parts for slot, failure in part.failures.items()}
        routed = RoutedExperts.join([part.routed for part in parts])
        return StepOutput(self._step, Sampled.join(sampled), timing, scored, failures, routed)


def _ns(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return int(begin.elapsed_time(end) * _NS_PER_MS)
