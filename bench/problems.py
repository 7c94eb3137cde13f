"""The word problems that the demo and the benchmarks ask: none of them was trained on."""

from pathlib import Path

from services.cli.bench import problems
from services.cli.bench.problems import Problem

PROBLEMS = Path(__file__).parent / "data" / "coverage_problems.jsonl"


def read_problems(path: Path = PROBLEMS) -> list[Problem]:
    """All problems of a file, in its order."""
    return problems.read_problems(path)
