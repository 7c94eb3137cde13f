"""What two moments say together: rates, and how long things took between them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.cli.top.source import Sample

KEPT = 60  # moments in the history of a rate


@dataclass(frozen=True)
class Rates:
    """Each second, since the moment before."""

    generated: float
    prompt: float
    cached: float  # prompt tokens that were not computed
    ended: float
    by_replica: dict[str, float]  # tokens generated, by address


@dataclass
class History:
    """Of one terminal. ``rates``: None before the second moment, and after the gateway was away."""

    rates: Rates | None = None
    quantiles: dict[str, tuple[float, float]] = field(default_factory=dict)  # p50 and p99, seconds; last known
    generated: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _last: Sample | None = None

    def take(self, sample: Sample) -> None:
        """The next one. A gateway tells the same for half a second, which adds nothing."""
        before = self._last
        seconds = 0.0 if before is None else sample.state["at"] - before.state["at"]
        if before is not None and seconds == 0:
            return
        self._last = sample
        if before is None or seconds < 0:  # its clock was set
            self.rates = None
            return
        by_replica = {
            address: _rise(load, _loads(before).get(address), "generated_tokens") / seconds
            for address, load in _loads(sample).items()
        }
        self.rates = Rates(
            generated=sum(by_replica.values()),
            prompt=_total(sample, before, "prompt_tokens") / seconds,
            cached=_total(sample, before, "cached_prompt_tokens") / seconds,
            ended=max(0.0, sample.ended - before.ended) / seconds,
            by_replica=by_replica,
        )
        self.generated.append(self.rates.generated)
        for label, counts in sample.counts.items():
            half, nearly_all = (_quantile(counts, before.counts.get(label, {}), share) for share in (0.5, 0.99))
            if half is not None and nearly_all is not None:
                self.quantiles[label] = half, nearly_all

    def forget(self) -> None:
        """The gateway is away: what comes next has nothing before it."""
        self._last = self.rates = None


def _loads(sample: Sample) -> dict[str, dict[str, Any]]:
    return {each["address"]: each["load"] for each in sample.state["replicas"] if each["load"] is not None}


def _total(sample: Sample, before: Sample, name: str) -> float:
    earlier = _loads(before)
    return sum(_rise(load, earlier.get(address), name) for address, load in _loads(sample).items())


def _rise(load: dict[str, Any], before: dict[str, Any] | None, name: str) -> float:
    """Of a counter; none for a scheduler that is new, or began again."""
    return 0.0 if before is None else max(0.0, load["counters"][name] - before["counters"][name])


def _quantile(counts: Mapping[float, float], before: Mapping[float, float], share: float) -> float | None:
    """The least bound that holds ``share`` of what was observed since ``before``; None = nothing was."""
    bounds = sorted(counts)
    since = [counts[bound] - before.get(bound, 0.0) for bound in bounds]
    if not since or since[-1] <= 0:
        return None
    return next(bound for bound, count in zip(bounds, since, strict=True) if count >= share * since[-1])
