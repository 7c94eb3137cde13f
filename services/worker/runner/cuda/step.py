"""A step that was launched, and what comes of it."""

import numpy as np
import torch

from services.common.plan.result import ScoredTokens, Timing
from services.common.plan.types import Plan
from services.worker.runner.cuda.ring import Place
from services.worker.runner.cuda.scores import StepScores
from services.worker.sampling.outcome import collect
from services.worker.sampling.rows import SampleRows
from services.worker.sampling.sampler import NOTHING_SAMPLED, concatenate
from services.worker.step.output import Failure, Sampled, StepOutput

_NS_PER_MS = 1_000_000


class Era:
    """What is remembered of the results between two resets. Owned by the thread that takes results."""

    def __init__(self, max_slots: int) -> None:
        self.failed = np.zeros(max_slots, bool)  # logits were not numbers once: the sequence's cache is spoilt


class CudaStep:
    """Made by the compute thread; ``result`` is called once, by any one thread, for the steps in their order."""

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
    ) -> None:
        """``slots [samples]`` int64, in the order of the results. ``rows`` and ``extras``, the last fields of
        ``SampledOnDevice`` in pinned memory: where more than tokens was asked for. ``order [samples]`` int64: which
        sample comes first, second, ... in the batch; None = as is. ``scores``: of prompts, on the host.
        ``failures``: by slot, why it fails whatever is sampled."""
        self.timing = Timing()
        self.scored: tuple[ScoredTokens, ...] = ()  # by ``read``
        self.place = place
        self._plan, self._era = plan, era
        self._slots, self._rows, self._extras, self._order = slots, rows, extras, order
        self._scores, self.failures = scores, failures or {}

    def result(self) -> StepOutput:
        """Waits for the device, without Python's lock. Raises what the device failed with."""
        try:
            return StepOutput(self._plan.step, self.read(), self.timing, self.scored, self.failures)
        finally:
            self.place.taken.set()

    def read(self) -> Sampled:
        """``result`` without giving the place back."""
        place, slots, failed = self.place, self._slots, self._era.failed
        try:
            place.wait()
            tokens = place.tokens[: len(slots)].astype(np.int64)
            self._measure()
        except BaseException as error:
            place.ring.give_up(error)
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
        return _reorder(collect(slots, tokens, finite, self._rows, *self._extras), self._order)

    def _measure(self) -> None:
        place, timing = self.place, self.timing
        timing.device = _ns(place.started, place.ended)
        timing.forward = timing.device  # of a step that is one graph nothing else is known
        if place.forwarded is not None:
            timing.forward = _ns(place.started, place.forwarded)
        timing.sample = timing.device - timing.forward
        if place.previous_end is not None:
            timing.idle = max(0, _ns(place.previous_end, place.started))


class CutStep:
    """As ``CudaStep``, of a step that was cut into micro-batches."""

    def __init__(self, step: int, parts: list[CudaStep]) -> None:
        """``parts`` in batch order, at least one."""
        self.timing = Timing()
        self._step, self._parts = step, parts

    def result(self) -> StepOutput:
        """As of ``CudaStep``."""
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
        return StepOutput(self._step, concatenate(sampled) if sampled else NOTHING_SAMPLED, timing, scored, failures)


def _ns(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return int(begin.elapsed_time(end) * _NS_PER_MS)


def _reorder(sampled: Sampled, order: np.ndarray | None) -> Sampled:
    """Return the samples in ``order``: first the one at ``order[0]``."""
    if order is None:
        return sampled
    return Sampled(
        slots=sampled.slots[order],
        token_ids=sampled.token_ids[order],
        finite=sampled.finite[order],
        logprobs=None if sampled.logprobs is None else sampled.logprobs[order],
        top=None if sampled.top is None else sampled.top[order],
    )
