"""Sets the lengths of sequences: limits for guaranteed sequences, predictions for others."""

import numpy as np
import numpy.typing as npt

from services.scheduler.core.request import Sample
from services.scheduler.core.state import State

_GOLDEN = (5**0.5 - 1) / 2
_Ints = npt.NDArray[np.int64]
_REFRESH_STEPS = 32  # steps between two observations of all running sequences


class Prediction:
    """Predicted lengths of sequences. Owned by the core.

    A predicted length is a quantile of the class, not its mean. The quantiles of successive sequences are spread evenly
    (an additive recurrence with the golden ratio), so that the lengths of many sequences have the distribution of the
    class. A sequence that becomes longer than predicted gets a new prediction.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._refreshed = 0

    def totals(self, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """Return the final lengths of waiting samples, prompt included (int64), and their quantiles (float64)."""
        limits = np.array([sample.request.limit for sample in samples], np.int64)
        quantiles = np.array([sample.arrival for sample in samples], np.int64) * _GOLDEN % 1
        chosen = np.array([index for index, sample in enumerate(samples) if not sample.guaranteed], np.int64)
        if len(chosen):
            rows = [(s.request.length_class_id, s.request.prompt_tokens, s.given) for s in samples if not s.guaranteed]
            classes, prompts, given = np.array(rows, np.int64).T
            limits[chosen] = self._draw(classes, prompts, given, limits[chosen], quantiles[chosen])
        return limits, quantiles

    def refresh(self, step: int) -> None:
        """Predict again before the plan ``step``: sequences past their predicted end, and sometimes all sequences."""
        state, slots = self._state, self._state.pool.slots
        running = slots.running_slots()
        if 0 <= step - self._refreshed < _REFRESH_STEPS:
            chosen = running[slots.end_step[running] <= step]
        else:
            chosen, self._refreshed = running, step
            ages = slots.known[running] - slots.prompt[running]
            state.queue.lengths.refresh(slots.length_class[running], ages, slots.observed_age[running])
            slots.observed_age[running] = ages
        if len(chosen):
            chosen = chosen[~slots.guaranteed[chosen]]
        if len(chosen):
            # The quantile changes each time. Otherwise low quantiles would be replaced sooner, and high ones remain.
            slots.quantile[chosen] = (slots.quantile[chosen] + _GOLDEN) % 1
            known = slots.known[chosen]
            classes, limits = slots.length_class[chosen], slots.limit[chosen]
            total = self._draw(classes, slots.prompt[chosen], known, limits, slots.quantile[chosen])
            slots.end_step[chosen] += total - slots.total[chosen]  # one token for each step
            slots.total[chosen] = total

    def _draw(self, classes: _Ints, prompts: _Ints, known: _Ints, limits: _Ints, quantiles: np.ndarray) -> _Ints:
        """Return final lengths in tokens, prompt included: int64."""
        drawn = self._state.queue.lengths.draw(classes, np.maximum(known - prompts, 0), quantiles)
        return np.minimum(prompts + np.minimum(drawn, limits), limits)
