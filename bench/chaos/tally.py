"""The counts of requests, and a report of each failed request."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.chaos.answer import Answer, Kind

_STORIES = 50  # largest number of reports
_SHOWN = 160  # characters of a verdict
KINDS: tuple[Kind, ...] = ("lost", "duplicated", "wrong", "hang")


@dataclass(frozen=True)
class Story:
    """The report of a failed request. Times are in seconds since the load began."""

    ask: str  # client-count
    verdict: str
    request: dict[str, Any]
    right: Answer
    got: Answer | None  # answer of the last attempt, if it was streamed
    attempts: list[str]
    ended_at: float
    faults: list[str]


class Tally:
    """The counts. Used on the program's event loop. Reports are written to ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.requests = self.tokens = self.retries = 0
        self._defects: Counter[Kind] = Counter()
        self._directory = directory

    def answered(self, answer: Answer) -> None:
        """Count a right answer."""
        self.requests += 1
        self.tokens += answer.completion_tokens

    def defect(self, kind: Kind, story: Story) -> None:
        self.requests += 1
        self._defects[kind] += 1
        number = self._defects.total()
        if number > _STORIES:
            return
        path = self._directory / f"story-{number}.json"
        path.write_text(json.dumps(asdict(story), indent=1, ensure_ascii=False))
        print(f"{story.ended_at} s: {story.verdict[:_SHOWN]} ({path})", flush=True)

    def figures(self) -> dict[str, Any]:
        counts = {"hangs" if kind == "hang" else kind: self._defects[kind] for kind in KINDS}
        return {"requests": self.requests, "tokens": self.tokens, "retries": self.retries, **counts}

    @property
    def perfect(self) -> bool:
        return not self._defects.total()
