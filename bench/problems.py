"""The word problems that the demo and the benchmarks ask: none of them was trained on."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

PROBLEMS = Path(__file__).parent / "data" / "coverage_problems.jsonl"
_FINAL_ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


@dataclass(frozen=True)
class Problem:
    """A question with its known final answer, and where it comes from."""

    source: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The question as the built-in model was trained to see it."""
        return f"Question: {self.question}\nAnswer:"

    def solved_by(self, text: str) -> bool:
        """Whether a worked answer ends in the right number (GSM8K's ``#### number``)."""
        match = _FINAL_ANSWER.search(text)
        return match is not None and _number(match[1]) == _number(self.answer)


def read_problems() -> list[Problem]:
    """All problems, in a fixed order."""
    rows = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    return [Problem(row["source"], row["question"], row["answer"]) for row in rows]


def _number(text: str) -> float:
    return float(text.replace(",", ""))
