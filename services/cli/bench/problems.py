"""Word problems in GSM8K's form, and the prompts that are made of them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_FINAL_ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


@dataclass(frozen=True)
class Problem:
    """A question with its known final answer, and where it comes from."""

    source: str
    question: str
    answer: str
    solution: str = ""

    @property
    def prompt(self) -> str:
        """The question as the built-in model was trained to see it."""
        return f"Question: {self.question}\nAnswer:"

    def solved_by(self, text: str) -> bool:
        """Whether a worked answer ends in the right number (GSM8K's ``#### number``)."""
        match = _FINAL_ANSWER.search(text)
        return match is not None and _number(match[1]) == _number(self.answer)


def read_problems(path: Path) -> list[Problem]:
    """All problems of a file, in its order. GSM8K's own files, whose ``answer`` is the whole solution, can be read."""
    return [_read(json.loads(line)) for line in path.read_text().splitlines()]


def few_shot_prompts(problems: list[Problem], count: int, shots: int = 4) -> list[str]:
    """``count`` prompts: ``shots`` solved problems, others for each prompt, and a question behind them. The problems
    come round again when there are too few."""
    prompts = []
    for index in range(count):
        solved = [problems[(index * (shots + 1) + shot) % len(problems)] for shot in range(shots + 1)]
        asked = solved.pop()
        prompts.append("".join(f"{problem.prompt} {problem.solution}\n\n" for problem in solved) + asked.prompt)
    return prompts


def _read(row: dict[str, str]) -> Problem:
    if "solution" in row:
        return Problem(row["source"], row["question"], row["answer"], row["solution"])
    return Problem("file", row["question"], row["answer"].rsplit("#### ", 1)[-1], row["answer"])


def _number(text: str) -> float:
    return float(text.replace(",", ""))
