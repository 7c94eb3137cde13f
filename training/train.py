"""Trains a built-in model and writes it as a Hugging Face directory.

    python -m training.train data=DIR out=DIR [model=builtin] [device=cuda] [minutes=5] [seed=0] [workers=..]

`model` is one of `SHAPES`.

DIR of `data` holds GSM8K's train.jsonl. Training takes `minutes` by the clock, not counting the
corpus and the compilation; every choice but the number of steps follows from the seed.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.augment import HELD_OUT, read_problems
from training.corpus import ROW_LENGTH, SOURCES, build_corpus, validation_rows
from training.model import LanguageModel, ModelConfig
from training.model_files import save_model
from training.muon import StackedMuon
from training.tokenizer import (
    FIRST_MERGED_ID,
    PROMPT_BIT,
    VOCAB_SIZE,
    save_tokenizer,
    train_tokenizer,
)

SHAPES = {
    "builtin": ModelConfig(dropout=0.1),
    "builtin-moe": ModelConfig(
        hidden_size=256,
        intermediate_size=64,
        layers=5,
        heads=4,
        norm_eps=1e-6,
        experts=16,
        experts_per_token=4,
        dropout=0.1,
    ),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run. `steps` ends it early, for tests."""

    data: Path
    out: Path
    device: str = "cuda"
    model: str = "builtin"
    minutes: float = 5.0
    seed: int = 0
    workers: int = os.cpu_count() or 1
    batch_rows: int = 256  # Rows of ROW_LENGTH tokens a step.
    matrix_rate: float = 4e-3
    embedding_rate: float = 4e-3
    weight_decay: float = 0.1
    balance_weight: float = 0.01  # Of the routers' balance loss, which is zero without experts.
    prompt_weight: float = 0.5  # Loss weight of a prompt's token; an answer's is 1.
    word_noise: float = 0.15  # Share of a prompt's words that are read as random ones.
    generated: int = 1_000_000  # Problems in the corpus, by source.
    resampled: int = 300_000
    original: int = 100_000
    steps: int = 1_000_000
    shape: ModelConfig | None = None  # Shape to train instead of that of `model`, for tests.

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> "Settings":
        """Return the settings from `name=value` words."""
        kinds = {f.name: f.type for f in fields(cls) if f.name != "shape"}
        values = dict(argument.split("=", 1) for argument in arguments)
        return cls(**{name: kinds[name](value) for name, value in values.items()})


class RowSource:
    """Rows of one source in a random order, which differs in each pass; int32 [rows, ROW_LENGTH]."""

    def __init__(self, rows: np.ndarray, device: str, generator: torch.Generator) -> None:
        self.rows = torch.from_numpy(rows.astype(np.int32)).to(device)
        self.generator = generator
        self.order = torch.empty(0, dtype=torch.int64)
        self.passes = 0

    def take(self, count: int) -> Tensor:
        """Return the next `count` rows."""
        while len(self.order) < count:
            order = torch.randperm(len(self.rows), generator=self.generator)
            self.order = torch.cat([self.order, order])
            self.passes += 1
        chosen, self.order = self.order[:count], self.order[count:]
        return self.rows[chosen.to(self.rows.device)]


def mixture(progress: float) -> dict[str, float]:
    """Return each source's share of a batch. GSM8K's share is largest in the last fifth.

    GSM8K is small. With a large share from the start, the model learns it by heart and becomes worse.
    """
    late = max(0.0, (progress - 0.8) / 0.2)
    return {
        "generated": 0.87 - 0.52 * late,
        "resampled": 0.08 + 0.30 * late,
        "original": 0.05 + 0.22 * late,
    }


def learning_rate_scale(progress: float, step: int) -> float:
    """Return a warm-up over 100 steps, then a constant rate, and from 55 % of the time on a decay to zero."""
    decay = min(1.0, max(0.0, (1.0 - progress) / 0.45))
    return min(1.0, (step + 1) / 100) * decay


def weighted_loss(model: LanguageModel, rows: Tensor, prompt_weight: float, word_noise: float) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the next token and the balance loss; rows int32 [batch, length] with marks.

    A share `word_noise` of the prompts' words is replaced in the input, so that the model cannot recognise a
    problem by a few rare words. Digits, marks and special tokens stay.
    """
    tokens = (rows & (PROMPT_BIT - 1)).long()
    marked = (rows & PROMPT_BIT) != 0
    is_word = marked & (tokens >= FIRST_MERGED_ID)
    replaced = is_word & (torch.rand(tokens.shape, device=tokens.device) < word_noise)
    noise = torch.randint_like(tokens, FIRST_MERGED_ID, VOCAB_SIZE)
    logits, balance = model.logits_and_balance(torch.where(replaced, noise, tokens)[:, :-1])
    weights = torch.where(marked[:, 1:], prompt_weight, 1.0)
    losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum(), balance


def make_optimizers(model: LanguageModel, settings: Settings) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    muon = StackedMuon(matrices, lr=settings.matrix_rate, weight_decay=settings.weight_decay)
    adam = torch.optim.AdamW(others, lr=settings.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def describe_validation(model: LanguageModel, rows: Tensor) -> str:
    """Describe the mean loss of the answers' tokens of rows int32 [rows, ROW_LENGTH], and the balance loss."""
    model.eval()
    with torch.no_grad(), torch.autocast(rows.device.type, torch.bfloat16):
        loss, balance = weighted_loss(model, rows, 0.0, 0.0)
    model.train()
    return f"validation {loss.item():.4f}" + (f" balance {balance.item():.3f}" if model.config.experts else "")


def next_batch(sources: dict[str, RowSource], rows: int, progress: float, step: int) -> Tensor:
    """Return the rows of a step. Every fourth step joins four rows into one, for long contexts."""
    shares = mixture(progress)
    counts = {name: round(rows * share) for name, share in shares.items()}
    counts["resampled"] += rows - sum(counts.values())
    batch = torch.cat([sources[name].take(count) for name, count in counts.items()])
    return batch.view(-1, 4 * ROW_LENGTH) if step % 4 == 3 else batch


def optimize(
    model: LanguageModel,
    sources: dict[str, RowSource],
    validation: Tensor,
    settings: Settings,
    report: Callable[[str], None],
) -> int:
    """Train until the time or the steps are used up. Return the number of tokens seen."""
    on_gpu = settings.device.startswith("cuda")
    loss_of = torch.compile(weighted_loss, dynamic=False) if on_gpu else weighted_loss
    optimizers = make_optimizers(model, settings)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(4):  # Compile for both lengths before the clock starts.
        batch = next_batch(sources, settings.batch_rows, 0.0, step)
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss, balance = loss_of(model, batch, settings.prompt_weight, settings.word_noise)
            (loss + settings.balance_weight * balance).backward()
    started, step, last_report = time.monotonic(), 0, -math.inf
    while step < settings.steps:
        elapsed = time.monotonic() - started
        progress = elapsed / (60 * settings.minutes)
        if progress >= 1.0:
            break
        batch = next_batch(sources, settings.batch_rows, progress, step)
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss, balance = loss_of(model, batch, settings.prompt_weight, settings.word_noise)
        model.zero_grad(set_to_none=True)
        (loss + settings.balance_weight * balance).backward()
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_scale(progress, step)
            optimizer.step()
        step += 1
        if step % 100 == 0 and elapsed - last_report >= 3 * settings.minutes:
            last_report = elapsed
            report(f"step {step} seconds {elapsed:.0f} loss {loss.item():.4f} {describe_validation(model, validation)}")
        elif step % 20 == 0:
            loss.item()  # Wait for the device, so that the clock shows the time of the steps.
    seconds = time.monotonic() - started
    seen = step * settings.batch_rows * ROW_LENGTH
    passes = {name: source.passes for name, source in sources.items()}
    report(
        f"trained {step} steps, {seen} tokens in {seconds:.0f} s ({seen / seconds:.0f} tokens/s); "
        f"passes {passes}; {describe_validation(model, validation)}"
    )
    return seen


def train(settings: Settings, report: Callable[[str], None] = print) -> None:
    """Make tokenizer and corpus, train, and write everything to `settings.out`."""
    if settings.shape is None and settings.model not in SHAPES:
        raise ValueError(f"model={settings.model!r} is not a built-in model: give one of {', '.join(SHAPES)}")
    shape = settings.shape or SHAPES[settings.model]
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    originals = read_problems(settings.data / "train.jsonl")[:-HELD_OUT]
    tokenizer = train_tokenizer(text for p in originals for text in (p.question, p.solution))
    counts = {source: getattr(settings, source) for source in SOURCES}
    started = time.monotonic()
    corpus = build_corpus(settings.data, tokenizer, counts, settings.seed, settings.workers)
    sizes = {source: rows.size for source, rows in corpus.items()}
    report(f"corpus tokens {sizes}, made in {time.monotonic() - started:.0f} s")
    generator = torch.Generator().manual_seed(settings.seed)
    sources = {name: RowSource(rows, settings.device, generator) for name, rows in corpus.items()}
    held_out = validation_rows(settings.data, tokenizer).astype(np.int32)
    validation = torch.from_numpy(held_out).to(settings.device)
    model = LanguageModel(shape).to(settings.device)
    optimize(model, sources, validation, settings, report)
    save_tokenizer(tokenizer, settings.out, shape.context)
    save_model(model, settings.out)
    report(f"{sum(p.numel() for p in model.parameters())} parameters written")


if __name__ == "__main__":
    train(Settings.from_arguments(sys.argv[1:]), lambda line: print(line, flush=True))
