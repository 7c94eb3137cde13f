"""The findings, each with its request in a file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

_MOST_FILES = 100
_MOST_SHOWN = 20


class Wrong(Exception):
    """An answer that a server must not give. ``kind``: kind of the finding."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class Findings:
    """The findings of a run. Used by one thread."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self.shown: list[str] = []
        self._directory, self._seed = directory, seed

    def add(self, surface: str, number: int, kind: str, what: str, request: bytes = b"", answer: bytes = b"") -> None:
        """Add a finding. ``number``: number of the request, or -1 if it belongs to no single request."""
        self.count += 1
        self.kinds[f"{surface} {kind}"] += 1
        if len(self.shown) < _MOST_SHOWN:
            self.shown.append(f"{surface} {number}: {kind}: {what[:500]}")
        if self.count <= _MOST_FILES:
            story = {"surface": surface, "number": number, "seed": self._seed, "kind": kind, "what": what}
            path = self._directory / f"finding-{surface}-{number}-{self.count}"
            path.with_suffix(".json").write_text(json.dumps(story, indent=2))
            path.with_suffix(".request").write_bytes(request)
            path.with_suffix(".answer").write_bytes(answer)

    def figures(self) -> dict[str, Any]:
        return {"findings": self.count, "findings_by_kind": dict(self.kinds), "findings_shown": self.shown}
