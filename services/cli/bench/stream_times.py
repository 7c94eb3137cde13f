"""The times of streams that begin at the same moment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.bench.exchange import Reply
from services.cli.bench.figures import Figures

HEADINGS = ("streams", "ms per token", "ms to first token", "p99", "tokens/s")


@dataclass(frozen=True)
class StreamTimes:
    """The times of a number of concurrent streams over all rounds: medians, and the 99th percentile of first tokens."""

    per_token_ms: float
    first_token_ms: float
    first_token_p99_ms: float
    failures: int

    @classmethod
    def of(cls, replies: Sequence[Reply]) -> "StreamTimes | None":
        """Return the times of ``replies``, or None if no stream has two tokens."""
        figures = Figures.of(replies, streamed=True)
        first, each = figures.first_token_ms, figures.per_token_ms
        return None if first is None or each is None else cls(each.p50, first.p50, first.p99, figures.failed)

    def row(self, count: int) -> tuple[str, ...]:
        """Return the row of a table with ``HEADINGS``, for ``count`` concurrent streams."""
        # The time per token is 0 if every answer arrived as one text.
        rate = 1000 * count / self.per_token_ms if self.per_token_ms else math.inf
        times = (self.per_token_ms, self.first_token_ms, self.first_token_p99_ms)
        return (str(count), *(f"{value:.2f}" for value in times), f"{rate:.0f}")
