"""Compare lm-evaluation-harness on our server and on transformers: ``python -m bench.lm_eval_agreement [model=...]``.

Runs two small tasks (``bench/data/lm_eval``), one by log-likelihood and one by generated text. ``lm_eval`` runs each
twice: with our server (``--model local-completions``) and with the same checkpoint in transformers (``--model hf``),
both in float32 on this machine's CPU. Both compute the tokens of the tokenizer of transformers. ``model`` is as for
``toka``, and on this machine: ``builtin``, ``smollm2``, a directory or a GGUF file. Needs ``pip install
'lm_eval[api,hf]'``, which is in no extra because it is large, and the repository's root as the working directory. The
last line is one JSON object. The exit status is 1 if a score, a text or a log-likelihood differs.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.server import report, serve
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from services.common.model.files import resolve
from services.common.model.gguf_file import is_gguf

TASKS = Path("bench/data/lm_eval")
CHOICE, WORKED = "toka_choice", "toka_worked"


class AgreementConfig(Config):
    """The flags."""

    model: str = Field("builtin", description="a model on this machine, as for toka")
    limit: Int = Field(40, ge=1, le=40, description="documents of each task")
    concurrent: Int = Field(8, ge=1, description="concurrent requests")
    tolerance: Float = Field(1e-3, gt=0, description="allowed difference of log-likelihoods")


def evaluate(config: AgreementConfig, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of both tasks, and the model's output for each document.

    Raises ``RuntimeError`` with the last lines of the harness if it fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable, "-m", "lm_eval", "--model", model,
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--include_path", str(TASKS), "--tasks", f"{CHOICE},{WORKED}", "--limit", str(config.limit),
            "--output_path", directory, "--log_samples", "--device", "cpu",
        ]  # fmt: skip
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"lm_eval --model {model} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        written = Path(directory)
        (results,) = written.rglob("results_*.json")
        scores = json.loads(results.read_text())["results"]
        return {
            "acc": scores[CHOICE]["acc,none"],
            "exact_match": scores[WORKED]["exact_match,final"],
            "loglikelihoods": [
                float(choice[0][0]) for sample in _samples(written, CHOICE) for choice in sample["resps"]
            ],
            "texts": [sample["resps"][0][0] for sample in _samples(written, WORKED)],
        }


def _samples(written: Path, task: str) -> list[dict[str, Any]]:
    """Return the entries of ``--log_samples`` in the order of the documents."""
    (path,) = written.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


@contextmanager
def reference(model: str) -> Iterator[dict[str, Any]]:
    """Return arguments of ``hf`` for ``model``. The directory of the tokenizer exists inside the context."""
    import transformers  # takes time to load

    path = resolve(model, weights=True).resolve()
    if not is_gguf(path):
        yield {"pretrained": path, "tokenizer": path}
        return
    with tempfile.TemporaryDirectory() as directory:  # the harness reads the tokenizer of a GGUF file for ``hf`` only
        transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)
        yield {"pretrained": path.parent, "gguf_file": path.name, "tokenizer": directory}


def measure(config: AgreementConfig) -> dict[str, Any]:
    with reference(config.model) as arguments:
        theirs = evaluate(config, "hf", {"dtype": "float32"} | arguments)
        with serve(model=config.model, device="cpu", dtype="float32", store_url="none") as server:
            ours = evaluate(
                config,
                "local-completions",
                {
                    "model": server.model, "base_url": f"{server.base_url}/v1/completions", "max_length": 2048,
                    "tokenizer_backend": "huggingface", "tokenizer": arguments["tokenizer"],
                    "num_concurrent": config.concurrent,
                },
            )  # fmt: skip
    pairs = list(zip(ours["loglikelihoods"], theirs["loglikelihoods"], strict=True))
    return {
        "acc": {"ours": ours["acc"], "hf": theirs["acc"]},
        "exact_match": {"ours": ours["exact_match"], "hf": theirs["exact_match"]},
        "loglikelihoods": len(pairs),
        "largest_difference": max(abs(our - their) for our, their in pairs),
        "texts": len(ours["texts"]),
        "different_texts": sum(our != their for our, their in zip(ours["texts"], theirs["texts"], strict=True)),
    }


def agrees(figures: dict[str, Any], tolerance: float) -> bool:
    same = all(figures[name]["ours"] == figures[name]["hf"] for name in ("acc", "exact_match"))
    return same and figures["largest_difference"] <= tolerance and not figures["different_texts"]


def main() -> None:
    config = from_command_line(AgreementConfig)
    if importlib.util.find_spec("lm_eval") is None:
        raise SystemExit("lm_eval is not installed: pip install 'lm_eval[api,hf]'")
    figures = measure(config)
    table = Table("", "our server", "transformers")
    for name in ("acc", "exact_match"):
        table.add_row(name, f"{figures[name]['ours']:.3f}", f"{figures[name]['hf']:.3f}")
    Console().print(table)
    report(figures)
    if not agrees(figures, config.tolerance):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
