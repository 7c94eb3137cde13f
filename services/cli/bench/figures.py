"""What the replies to a load amount to."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from services.cli.bench.clients import makespan
from services.cli.bench.exchange import Reply


@dataclass(frozen=True)
class Spread:
    """Of one kind of time, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None without values."""
        found = np.fromiter(values, float)
        if not found.size:
            return None
        return cls(float(found.mean()), *(float(each) for each in np.percentile(found, (50, 90, 99, 100))))


@dataclass(frozen=True)
class Errors:
    """Of one kind."""

    count: int
    example: str


@dataclass(frozen=True)
class Figures:
    """Of a load, as far as it went. Tokens are what usage says, and of the requests that succeeded."""

    seconds: float  # from the first request to the last answer
    succeeded: int
    failed: int
    unfinished: int  # when it was interrupted
    input_tokens: int
    output_tokens: int
    errors: dict[str, Errors]  # by kind
    first_token_ms: Spread | None  # this and the next two: of streams
    inter_token_ms: Spread | None  # from one arrival of text to the next, of all streams
    per_token_ms: Spread | None  # of each stream: from its first text to its last, over its tokens less one
    end_to_end_ms: Spread | None

    @classmethod
    def of(cls, replies: Sequence[Reply], *, streamed: bool, unfinished: int = 0) -> "Figures":
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
        """So many, in a second."""
        return count / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "requests_per_second": self.rate(self.succeeded),
            "input_tokens_per_second": self.rate(self.input_tokens),
            "output_tokens_per_second": self.rate(self.output_tokens),
        }


def output_rate(replies: Sequence[Reply], bins: int, *, streamed: bool) -> tuple[list[float], list[float]]:
    """Seconds from the start, in the middle of each bin, and output tokens a second in it: as if the tokens of a
    stream came evenly from its first text to its last, and those of a whole answer from its request to its end."""
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
    """Edges, one more than bins, each as many times the one before it, and how many values lie between them."""
    low, high = max(min(values), 1e-3), max(max(values), 1e-3)
    if high <= low * 1.01:
        low, high = low / 1.5, high * 1.5
    edges = np.geomspace(low, math.nextafter(high, math.inf), bins + 1)
    counts, _ = np.histogram(np.clip(values, low, high), edges)
    return edges.tolist(), counts.tolist()


def _by_kind(replies: Sequence[Reply]) -> dict[str, Errors]:
    found: dict[str, Errors] = {}
    for reply in replies:
        if reply.error:
            before = found.get(reply.kind)
            found[reply.kind] = Errors(1 + (before.count if before else 0), before.example if before else reply.error)
    return dict(sorted(found.items(), key=lambda each: -each[1].count))
