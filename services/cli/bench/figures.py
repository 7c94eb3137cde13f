"""The figures of a load: counts, rates and distributions of times."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from services.cli.bench.clients import makespan
from services.cli.bench.exchange import Reply


@dataclass(frozen=True)
class Spread:
    """The distribution of one kind of time, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """Return the distribution of ``values``, or None if there are none."""
        found = np.fromiter(values, float)
        if not found.size:
            return None
        return cls(float(found.mean()), *(float(each) for each in np.percentile(found, (50, 90, 99, 100))))


@dataclass(frozen=True)
class Errors:
    """The errors of one kind."""

    count: int
    example: str  # message of the first one


@dataclass(frozen=True)
class Figures:
    """The figures of a load up to its end or its interruption. Tokens are counted by usage of successful requests."""

    seconds: float  # from the first request to the end of the last reply
    succeeded: int
    failed: int
    unfinished: int  # requests that ran when the load was interrupted
    input_tokens: int
    output_tokens: int
    errors: dict[str, Errors]  # by kind
    first_token_ms: Spread | None  # of streams
    inter_token_ms: Spread | None  # of streams: from one arrival of text to the next
    per_token_ms: Spread | None  # of streams: from first to last text, divided by the number of tokens minus one
    end_to_end_ms: Spread | None

    @classmethod
    def of(cls, replies: Sequence[Reply], *, streamed: bool, unfinished: int = 0) -> "Figures":
        """Return the figures of ``replies``, which are streams if ``streamed``."""
        good = [reply for reply in replies if not reply.error]
        streams = good if streamed else []
        return cls(
            seconds=makespan(replies) if replies else 0.0,
            succeeded=len(good),
            failed=len(replies) - len(good),
            unfinished=unfinished,
            input_tokens=sum(reply.prompt_tokens for reply in good),
            output_tokens=sum(reply.completion_tokens for reply in good),
            errors=_by_kind(replies),
            first_token_ms=Spread.of(1000 * (reply.first_at - reply.sent_at) for reply in streams),
            inter_token_ms=Spread.of(1000 * gap for reply in streams for gap in reply.gaps),
            per_token_ms=Spread.of(reply.per_token_ms for reply in streams if reply.completion_tokens > 1),
            end_to_end_ms=Spread.of(1000 * (reply.ended_at - reply.sent_at) for reply in good),
        )

    def rate(self, count: int) -> float:
        """Return ``count`` divided by the duration of the load, per second."""
        return count / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the figures and the rates for a results file."""
        return asdict(self) | {
            "requests_per_second": self.rate(self.succeeded),
            "input_tokens_per_second": self.rate(self.input_tokens),
            "output_tokens_per_second": self.rate(self.output_tokens),
        }


def output_rate(replies: Sequence[Reply], bins: int, *, streamed: bool) -> tuple[list[float], list[float]]:
    """Return the middle of each bin in seconds from the start, and the output tokens per second in it.

    The tokens of a stream are distributed evenly from its first text to its last. The tokens of a whole answer are
    distributed from its request to its end.
    """
    good = [reply for reply in replies if not reply.error]
    if not good:
        return [], []
    start, end = min(reply.sent_at for reply in replies), max(reply.ended_at for reply in replies)
    edges = np.linspace(start, end, bins + 1)
    spans = [(reply.first_at, reply.last_at) if streamed else (reply.sent_at, reply.ended_at) for reply in good]
    firsts, lasts = np.array([(first, max(last, first + 1e-9)) for first, last in spans]).T
    tokens = np.array([reply.completion_tokens for reply in good])
    so_far = np.array([(tokens * np.clip((edge - firsts) / (lasts - firsts), 0, 1)).sum() for edge in edges])
    width = max((end - start) / bins, 1e-9)
    return ((edges[:-1] + edges[1:]) / 2 - start).tolist(), (np.diff(so_far) / width).tolist()


def histogram(values: Sequence[float], bins: int) -> tuple[list[float], list[int]]:
    """Return the edges of ``bins`` bins in geometric progression, and the number of values in each bin."""
    low, high = max(min(values), 1e-3), max(max(values), 1e-3)
    if high <= low * 1.01:
        low, high = low / 1.5, high * 1.5
    edges = np.geomspace(low, math.nextafter(high, math.inf), bins + 1)
    counts, _ = np.histogram(np.clip(values, low, high), edges)
    return edges.tolist(), counts.tolist()


def _by_kind(replies: Sequence[Reply]) -> dict[str, Errors]:
    counts = Counter(reply.kind for reply in replies if reply.error)
    examples = {reply.kind: reply.error for reply in reversed(replies) if reply.error}
    return {kind: Errors(count, examples[kind]) for kind, count in counts.most_common()}
