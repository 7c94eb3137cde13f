"""Word problems in the form of GSM8K, and few-shot prompts that consist of them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_FINAL_ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


@dataclass(frozen=True)
class Problem:
    """A question with its final answer."""

    source: str  # name of the dataset
    question: str
    answer: str
    solution: str = ""

    @property
    def prompt(self) -> str:
        """The question in the form in which the built-in model was trained."""
        return f"Question: {self.question}\nAnswer:"

    def solved_by(self, text: str) -> bool:
        """Return whether a solution has the right final answer, in GSM8K's form ``#### number``."""
        match = _FINAL_ANSWER.search(text)
        return match is not None and float(match[1].replace(",", "")) == float(self.answer.replace(",", ""))


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a file, in its order.

    In GSM8K's own files ``answer`` is the whole solution. Raises ``ValueError``, ``KeyError`` or ``OSError``.
    """
    return [_read(json.loads(line)) for line in path.read_text().splitlines()]


def few_shot_prompts(problems: list[Problem], count: int, shots: int = 4) -> list[str]:
    """Return ``count`` prompts of ``shots`` solved problems and a question.

    Each prompt has other problems. After the last problem they are used again.
    """
    prompts = []
    for index in range(count):
        *solved, last = [problems[(index * (shots + 1) + shot) % len(problems)] for shot in range(shots + 1)]
        prompts.append("".join(f"{problem.prompt} {problem.solution}\n\n" for problem in solved) + last.prompt)
    return prompts


def _read(row: dict[str, str]) -> Problem:
    if "solution" in row:
        return Problem(row["source"], row["question"], row["answer"], row["solution"])
    return Problem("file", row["question"], row["answer"].rsplit("#### ", 1)[-1], row["answer"])
