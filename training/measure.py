"""Measures a trained model for its card: pass@k on every set of problems, and the experts' shares of the choices.

    python -m training.measure data=DIR model=DIR [out=FILE] [seconds=1000] [samples=128] [limit=200] [device=cuda]

DIR of `data` holds GSM8K's test.jsonl and train.jsonl. Each row of the card is printed when it is measured, and
written to FILE as a line of JSON. After `seconds`, no further row begins.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.augment import HELD_OUT, read_problems
from training.corpus import held_out_generated, validation_rows
from training.evaluate import evaluate
from training.model import LanguageModel
from training.model_files import load_model
from training.problems import Problem
from training.tokenizer import PROMPT_BIT


@dataclass(frozen=True)
class Row:
    """A row of the card's table. Temperature 0 needs one sample."""

    name: str
    problems: list[Problem]
    temperature: float
    chat: bool = False


def card_rows(data: Path, limit: int) -> list[Row]:
    """Return the rows of the card, the most important first."""
    test = read_problems(data / "test.jsonl")[:limit]
    validation = read_problems(data / "train.jsonl")[-HELD_OUT:][: limit + limit // 2]
    generated = held_out_generated(limit)
    return [
        Row("generated, held out", generated, 0.0),
        Row("GSM8K test", test, 1.0),
        Row("GSM8K test", test, 0.8),
        Row("generated, held out", generated, 0.8),
        Row("GSM8K test, chat format", test, 0.8, chat=True),
        Row("GSM8K train, held out", validation, 0.8),
        Row("GSM8K train, held out", validation, 1.0),
        Row("generated, held out", generated, 1.0),
    ]


@torch.inference_mode()
def expert_shares(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return each expert's share of the choices for tokens int64 [batch, length]: float32 [layers, experts].

    The shares of a layer sum to 1.
    """
    shares: list[Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, given: shares.append((given[1] > 0).float().mean(dim=0) / model.config.experts_per_token)
        )
        for layer in model.model["layers"]
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(shares).cpu()


def describe_shares(shares: Tensor) -> dict[str, object]:
    """Return the least and the largest share of each layer, in percent."""
    return {
        "row": "experts' shares of the choices in GSM8K train, held out, by layer",
        "equal": round(100 / shares.shape[1], 2),
        "least": [round(100 * share, 2) for share in shares.min(dim=1).values.tolist()],
        "largest": [round(100 * share, 2) for share in shares.max(dim=1).values.tolist()],
    }


def measure(row: Row, model: LanguageModel, tokenizer: Tokenizer, samples: int) -> dict[str, object]:
    """Return pass@k of one row in percent, and the seconds that it took."""
    started = time.monotonic()
    count = samples if row.temperature > 0 else 1
    scores, answers = evaluate(model, tokenizer, row.problems, count, row.temperature, row.chat, seed=0)
    return {
        "row": row.name,
        "problems": len(row.problems),
        "samples": count,
        "temperature": row.temperature,
        **{f"pass@{k}": round(100 * score, 2) for k, score in scores.items()},
        "seconds": round(time.monotonic() - started, 1),
        "first answer": answers[0],
    }


def main() -> None:
    """Print the rows of the card."""
    started = time.monotonic()
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    directory, data = Path(options["model"]), Path(options["data"])
    out, seconds = options.get("out", "/dev/null"), float(options.get("seconds", 1000))
    device = options.get("device", "cuda")
    model = load_model(directory).to(device).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    with Path(out).open("w", encoding="utf-8") as file:

        def record(values: dict[str, object]) -> None:
            line = json.dumps(values, ensure_ascii=False)
            print(line, flush=True)
            print(line, file=file, flush=True)

        if model.config.experts:
            marked = validation_rows(data, tokenizer).astype(np.int64) & (PROMPT_BIT - 1)
            record(describe_shares(expert_shares(model, torch.from_numpy(marked[:64]).to(device))))
        for row in card_rows(data, int(options.get("limit", 200))):
            if time.monotonic() - started < seconds:
                record(measure(row, model, tokenizer, int(options.get("samples", 128))))


if __name__ == "__main__":
    main()
