"""What the model is trained on and measured with.

    python -m training.corpus data=DIR out=FILE

writes the benchmark's problems: 60 of GSM8K's test file and 40 generated ones, none trained on.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.augment import HELD_OUT, Template, read_problems, rename_people
from training.problems import Problem
from training.scenarios import generate_problem
from training.tokenizer import pack_documents

ROW_LENGTH = 512
SOURCES = ("generated", "resampled", "original")
HELD_OUT_SEED = 20_000_003
JOB_PROBLEMS = 4000  # Problems of one worker's job.


def held_out_generated(count: int) -> list[Problem]:
    """The first `count` generated problems that are kept for measuring."""
    rng = random.Random(HELD_OUT_SEED)
    return [generate_problem(rng) for _ in range(count)]


class ProblemSource:
    """Endless training problems of each source, from GSM8K's training file and a seed."""

    def __init__(self, data: Path) -> None:
        self.originals = read_problems(data / "train.jsonl")[:-HELD_OUT]
        parsed = (Template.parse(problem) for problem in self.originals)
        self.templates = [template for template in parsed if template is not None]
        self.held_out = {problem.question for problem in held_out_generated(1000)}

    def stream(self, source: str, seed: int) -> Iterator[Problem]:
        """Problems of one source, without end."""
        rng = random.Random(f"{source} {seed}")
        while True:
            if source == "generated":
                problem = generate_problem(rng)
                if problem.question not in self.held_out:
                    yield problem
                continue
            pool = self.templates if source == "resampled" else self.originals
            for item in rng.sample(pool, len(pool)):
                new = item.resample(rng) if isinstance(item, Template) else item
                if new is not None:
                    yield rename_people(new, rng) if rng.random() < 0.5 else new


_worker: tuple[ProblemSource, Tokenizer]


def _start_worker(data: Path, tokenizer: str) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = ProblemSource(data), Tokenizer.from_str(tokenizer)


def _pack_job(job: tuple[str, int, int]) -> tuple[str, np.ndarray]:
    source, seed, count = job
    problems = list(islice(_worker[0].stream(source, seed), count))
    rows = pack_documents(problems, _worker[1], ROW_LENGTH, random.Random(seed))
    return source, rows


def build_corpus(
    data: Path, tokenizer: Tokenizer, counts: dict[str, int], seed: int, workers: int
) -> dict[str, np.ndarray]:
    """Rows of packed documents for each source, uint16 [rows, ROW_LENGTH].

    `counts` says how many problems each source gives. The result depends on the seed alone, not on
    the number of workers.
    """
    jobs = [
        (source, seed * 1_000_000 + start, min(JOB_PROBLEMS, count - start))
        for source, count in counts.items()
        for start in range(0, count, JOB_PROBLEMS)
    ]
    rows: dict[str, list[np.ndarray]] = {source: [] for source in counts}
    arguments = (data, tokenizer.to_str())
    if workers <= 1:
        _start_worker(*arguments)
        for source, packed in map(_pack_job, jobs):
            rows[source].append(packed)
    else:
        with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, arguments) as pool:
            for source, packed in pool.map(_pack_job, jobs):
                rows[source].append(packed)
    return {source: np.concatenate(parts) for source, parts in rows.items()}


def validation_rows(data: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The problems of GSM8K's training file that are held out, packed like the corpus."""
    problems = read_problems(data / "train.jsonl")[-HELD_OUT:]
    return pack_documents(problems, tokenizer, ROW_LENGTH, random.Random(0))


def benchmark_records(data: Path) -> list[dict[str, str]]:
    """60 problems of GSM8K's test file with a plain number as answer, and 40 generated ones."""
    tests = read_problems(data / "test.jsonl")
    plain = [problem for problem in tests if problem.answer.replace(".", "", 1).isdigit()]
    chosen = [("gsm8k-test", problem) for problem in plain[:60]]
    chosen += [("generated", problem) for problem in held_out_generated(40)]
    return [{"source": s, "question": p.question, "answer": p.answer, "solution": p.solution} for s, p in chosen]


def main() -> None:
    """Write the benchmark's problems, one JSON object a line."""
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    records = benchmark_records(Path(options["data"]))
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    Path(options["out"]).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
