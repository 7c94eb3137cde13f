"""The word problems of the demo and the benchmarks. The built-in model was not trained on them."""

from pathlib import Path

from services.cli.bench import problems
from services.cli.bench.problems import Problem

PROBLEMS = Path(__file__).parent / "data" / "coverage_problems.jsonl"


def read_problems(path: Path = PROBLEMS) -> list[Problem]:
    """Return all problems of a file, in its order."""
    return problems.read_problems(path)
