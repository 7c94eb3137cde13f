"""A step that was launched, and what comes of it."""

import numpy as np
import torch

from services.worker.runner.cuda.inputs import StepArrays
from services.worker.runner.cuda.ring import Place
from services.worker.runner.plan import Plan, Sampled, StepOutput, Timing
from services.worker.sampling.outcome import SampledOnDevice, collect
from services.worker.sampling.rows import SampleRows
from services.worker.sampling.sampler import NOTHING

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
        arrays: StepArrays,
        rows: SampleRows | None,
        extras: tuple[torch.Tensor | None, ...],
        era: Era,
    ) -> None:
        """``extras``: the last fields of ``SampledOnDevice``, in pinned memory."""
        self.timing = Timing()
        self._plan, self._place, self._arrays, self._rows = plan, place, arrays, rows
        self._extras, self._era = extras, era

    def result(self) -> StepOutput:
        """Waits for the device, without Python's lock. Raises what the device failed with."""
        place, arrays, failed = self._place, self._arrays, self._era.failed
        count = len(arrays.sample_slots)
        try:
            place.wait()
            tokens = place.host_results[:count].clone()
            self._measure()
        except BaseException as error:
            place.ring.give_up(error)
            raise
        finally:
            place.taken.set()
        failed[self._plan.releases] = False
        if count == 0:
            return StepOutput(self._plan.step, NOTHING, self.timing)
        found = SampledOnDevice(tokens, (tokens >= 0).to(torch.uint8), *self._extras)
        sampled = collect(found, self._rows, failed[arrays.sample_slots])
        failed[arrays.sample_slots] = ~sampled.finite
        return StepOutput(self._plan.step, _reorder(sampled, arrays.batch_order), self.timing)

    def _measure(self) -> None:
        place, timing = self._place, self.timing
        timing.device = int(place.started.elapsed_time(place.ended) * _NS_PER_MS)
        timing.forward = timing.device  # of a step that is one graph nothing else is known
        if place.forwarded is not None:
            timing.forward = int(place.started.elapsed_time(place.forwarded) * _NS_PER_MS)
        timing.sample = timing.device - timing.forward
        if place.previous_end is not None:
            timing.idle = max(0, int(place.previous_end.elapsed_time(place.started) * _NS_PER_MS))


def _reorder(sampled: Sampled, order: np.ndarray | None) -> Sampled:
    """The samples in ``order``: first the one at ``order[0]``."""
    if order is None:
        return sampled
    top_counts, top_ids, top_logprobs = sampled.top_counts, sampled.top_token_ids, sampled.top_logprobs
    if top_counts is not None:
        ends = np.cumsum(top_counts)
        within = np.concatenate([np.arange(ends[i] - top_counts[i], ends[i]) for i in order.tolist()])
        top_counts, top_ids, top_logprobs = top_counts[order], top_ids[within], top_logprobs[within]
    return Sampled(
        slots=sampled.slots[order],
        token_ids=sampled.token_ids[order],
        finite=sampled.finite[order],
        logprobs=None if sampled.logprobs is None else sampled.logprobs[order],
        top_counts=top_counts,
        top_token_ids=top_ids,
        top_logprobs=top_logprobs,
    )
