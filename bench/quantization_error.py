"""Measure the loss of precision by quantized weights: ``python -m bench.quantization_error [model=builtin]
[problems=60] [kinds=fp8_row,int4] [device=auto]``.

Runs the model over the word problems and their solutions, and compares each kind with float32, and also with bfloat16.
The kinds are bfloat16; bfloat16 with fp8 products, with keys and values rounded to fp8, and with both; float32, on
GPUs bfloat16, with ``quantization=int8`` and ``int4``; and float32 with the weights of the layers in each format of
published checkpoints (``bench.quantized_formats``). Figures over all tokens are the mean absolute difference of the
log-probability (nats), the mean divergence of the distributions (nats), the share of tokens with the same most likely
token, and the perplexity. On CPUs, fp8 products are computed by a float32 reference.

The log-probabilities of float32 and bfloat16 are kept: 8 bytes for each token of the vocabulary and of the texts. The
last line is one JSON object.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from bench.problems import read_problems
from bench.quantized_formats import FORMATS, apply
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Int, Strings
from services.common.model import files as model_files
from services.common.text.tokenizer import Tokenizer
from services.worker.attention.base import AttentionBatch, AttentionStep
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention
from services.worker.described.registry import read_model_config
from services.worker.layers.factory import make_linear
from services.worker.layers.fp8 import FP8, LARGEST
from services.worker.layers.kernels import TorchKernels
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel

PAGE_SIZE = 16
EXACT = ("float32", "bfloat16")
# dtype, quantization, true if keys and values are rounded
FLAGS = {
    "float32": (torch.float32, "none", False),
    "bfloat16": (torch.bfloat16, "none", False),
    "fp8": (torch.bfloat16, "fp8", False),
    "fp8_cache": (torch.bfloat16, "none", True),
    "fp8_and_cache": (torch.bfloat16, "fp8", True),
}
# On GPUs, products with integers take inputs of 16 bits.
INTEGER_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


class BenchConfig(Config):
    """The flags."""

    model: str = "builtin"
    problems: Int = Field(60, ge=1)
    max_tokens: Int = Field(512, ge=2, description="tokens to which longer texts are cut")
    kinds: Strings = Field((), description="kinds to compare with float32 and bfloat16; none = all")
    device: Literal["auto", "cpu", "cuda"] = "auto"


@torch.inference_mode()
def main() -> None:
    """Measure, print a line for each kind, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if config.device == "auto" else config.device)
    card = model_files.read_card(config.model, weights=True)
    tokenizer = Tokenizer.load(config.model)
    problems = read_problems()[: config.problems]
    encoded = [tokenizer.encode(f"{each.prompt} {each.solution}")[: config.max_tokens] for each in problems]
    texts = [torch.tensor(each, device=device) for each in encoded]

    exact: dict[str, list[torch.Tensor]] = {}
    rows: list[dict[str, Any]] = []
    for kind in (*EXACT, *chosen_kinds(config.kinds, card, device)):
        dtype, quantization, rounded = flags_on(device).get(kind, FLAGS["float32"])
        model = load(card, dtype, quantization, device)
        if kind in FORMATS:
            apply(FORMATS[kind], model)
        found = [logprobs_of(model, text, rounded=rounded) for text in texts]
        row: dict[str, Any] = {"kind": kind, "perplexity": round(perplexity(found, texts), 4)}
        row |= {f"against_{other}": compared(found, theirs, texts) for other, theirs in exact.items()}
        if kind in EXACT:
            exact[kind] = found
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    tokens = sum(len(text) - 1 for text in texts)
    report({"model": card.name, "device": str(device), "tokens": tokens, "kinds": rows})


def flags_on(device: torch.device) -> dict[str, tuple[torch.dtype, str, bool]]:
    """Return ``FLAGS`` with those of integer weights."""
    return FLAGS | {name: (INTEGER_DTYPES[device.type], name, False) for name in ("int8", "int4")}


def chosen_kinds(names: Sequence[str], card: model_files.ModelCard, device: torch.device) -> list[str]:
    """Return the kinds to compare: ``names``, or without any all that fit the model and the device.

    Exits with a message that lists the kinds if a name is unknown.
    """
    has_experts = bool(read_model_config(model_files.read_config(card.directory)).experts)
    # The inputs of experts are not rounded.
    formats = [name for name, each in FORMATS.items() if each.inputs is None or not has_experts]
    known = [name for name in (*flags_on(device), *formats) if name not in EXACT]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"kinds={','.join(unknown)} cannot be measured; choose from {', '.join(known)}")
    return list(names) or known


def perplexity(found: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> float:
    """Return the perplexity of ``texts``, each ``[tokens]``, by log-probabilities ``[tokens, vocab_size]``."""
    return float(torch.cat([-following(*each) for each in zip(found, texts, strict=True)]).mean().exp())


def following(logprobs: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the tokens of ``text`` after the first one."""
    return logprobs[:-1].gather(1, text[1:, None])[:, 0]


def compared(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Return how log-probabilities differ from ``expected`` ones, as means over the tokens of ``texts``."""
    parts = []
    for mine, theirs, text in zip(found, expected, texts, strict=True):
        difference = (following(mine, text) - following(theirs, text)).abs()
        divergence = (theirs.exp() * (theirs - mine)).sum(-1)[:-1]
        same = (mine.argmax(-1) == theirs.argmax(-1))[:-1].float()
        parts.append(torch.stack((difference, divergence, same)))
    difference, divergence, same = torch.cat(parts, dim=1).mean(dim=1).tolist()
    return {"logprob": round(difference, 5), "divergence": round(divergence, 6), "top1": round(same, 4)}


def load(card: model_files.ModelCard, dtype: torch.dtype, quantization: str, device: torch.device) -> DecoderModel:
    config = read_model_config(model_files.read_config(card.directory))
    model = DecoderModel(config, dtype, device, TorchKernels(), make_linear(config, dtype, device, quantization))
    weights.load(card.directory, model.targets(), config)
    return model


class RoundedStep(AttentionStep):
    """An attention step that first rounds keys and values to fp8, as a cache in fp8 does."""

    def __init__(self, step: AttentionStep) -> None:
        self._step = step

    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rounded = (each.float().clamp(-LARGEST, LARGEST).to(FP8).to(each.dtype) for each in (keys, values))
        return self._step.run(layer, queries, *rounded)


def logprobs_of(model: DecoderModel, token_ids: torch.Tensor, *, rounded: bool = False) -> torch.Tensor:
    """Return log-probabilities after every token of a sequence, ``[tokens, vocab_size]`` float32.

    ``rounded``: round keys and values to fp8.
    """
    config, (tokens,) = model.config, token_ids.shape
    pages = -(-tokens // PAGE_SIZE)
    shape = {"layers": len(config.layers), "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    dtype, device = model.embedding.dtype, model.embedding.device
    cache = KvCache(page_count=pages, page_size=PAGE_SIZE, dtype=dtype, device=device, **shape)
    batch = AttentionBatch(
        token_slots=np.zeros(tokens, np.int64),
        positions=np.arange(tokens),
        row_slots=np.zeros(1, np.int64),
        row_starts=np.zeros(1, np.int64),
        row_counts=np.array([tokens]),
        page_table=np.arange(pages, dtype=np.int32)[None],
    )
    step = PlainAttention(cache).step(batch, lambda: None)
    step = RoundedStep(step) if rounded else step
    return model.logits(model(token_ids, torch.arange(tokens, device=device), step)).log_softmax(-1)


if __name__ == "__main__":
    main()
