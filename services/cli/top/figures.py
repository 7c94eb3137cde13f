"""Computes rates and latencies between two snapshots."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.cli.top.source import Snapshot

KEPT = 60  # length of the history of a rate


@dataclass(frozen=True)
class Rates:
    """Rates per second since the previous snapshot."""

    generated: float
    prompt: float
    cached: float  # prompt tokens that were not computed
    finished: float  # samples
    by_replica: dict[str, float]  # tokens generated, by address


@dataclass
class History:
    """History shown on one terminal. ``rates`` is None before the second snapshot, and after a lost connection."""

    rates: Rates | None = None
    quantiles: dict[str, tuple[float, float]] = field(default_factory=dict)  # p50 and p99 in seconds
    generated: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _last: Snapshot | None = None

    def take(self, sample: Snapshot) -> None:
        """Add a snapshot.

        It is ignored if it is the previous one, since a gateway renews its state every half second.
        """
        before = self._last
        seconds = 0.0 if before is None else sample.state["at"] - before.state["at"]
        if before is not None and seconds == 0:
            return
        self._last = sample
        if before is None or seconds < 0:  # the gateway's clock was set back
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
            finished=max(0.0, sample.finished - before.finished) / seconds,
            by_replica=by_replica,
        )
        self.generated.append(self.rates.generated)
        for label, counts in sample.counts.items():
            p50, p99 = (_quantile(counts, before.counts.get(label, {}), share) for share in (0.5, 0.99))
            if p50 is not None and p99 is not None:
                self.quantiles[label] = p50, p99

    def forget(self) -> None:
        """Drop the previous snapshot after the connection was lost."""
        self._last = self.rates = None


def _loads(sample: Snapshot) -> dict[str, dict[str, Any]]:
    return {each["address"]: each["load"] for each in sample.state["replicas"] if each["load"] is not None}


def _total(sample: Snapshot, before: Snapshot, name: str) -> float:
    earlier = _loads(before)
    return sum(_rise(load, earlier.get(address), name) for address, load in _loads(sample).items())


def _rise(load: dict[str, Any], before: dict[str, Any] | None, name: str) -> float:
    """Return the increase of a counter, or 0 for a scheduler that is new or was restarted."""
    return 0.0 if before is None else max(0.0, load["counters"][name] - before["counters"][name])


def _quantile(counts: Mapping[float, float], before: Mapping[float, float], share: float) -> float | None:
    """Return the least bound with at least ``share`` of the observations since ``before``, or None without any."""
    bounds = sorted(counts)
    since = [counts[bound] - before.get(bound, 0.0) for bound in bounds]
    if not since or since[-1] <= 0:
        return None
    return next(bound for bound, count in zip(bounds, since, strict=True) if count >= share * since[-1])
