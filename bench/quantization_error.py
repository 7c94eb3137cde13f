"""Measure the loss of precision by fp8, int8 and int4: ``python -m bench.quantization_error [model=builtin]
[problems=60] [device=auto]``.

Runs the model over the word problems and their solutions in float32, in bfloat16, in bfloat16 with fp8 products, with
keys and values rounded to fp8, and with both, and with weights in int8 and int4, on CPUs in float32. All are compared
with float32, and all but bfloat16 also with bfloat16. Figures over all tokens are the mean absolute difference of the
log-probability (nats), the mean divergence of the distributions (nats), the share of tokens with the same most likely
token, and the perplexity. On CPUs, fp8 products are computed by a float32 reference. The last line is one JSON object.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field

from bench.problems import read_problems
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Int
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
# dtype, quantization, true if keys and values are rounded
KINDS = {
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
    device: Literal["auto", "cpu", "cuda"] = "auto"


@torch.inference_mode()
def main() -> None:
    """Measure, print a line for each pair, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if config.device == "auto" else config.device)
    card = model_files.read_card(config.model, weights=True)
    tokenizer = Tokenizer.load(config.model)
    problems = read_problems()[: config.problems]
    texts = [tokenizer.encode(f"{each.prompt} {each.solution}")[: config.max_tokens] for each in problems]
    kinds = KINDS | {name: (INTEGER_DTYPES[device.type], name, False) for name in ("int8", "int4")}
    models = {name: load(card, dtype, quantization, device) for name, (dtype, quantization, _) in kinds.items()}

    losses = {name: [] for name in kinds}
    exact = list(kinds)[:2]
    compared = {(name, other): [] for other in exact for name in kinds if name not in exact[: exact.index(other) + 1]}
    for text in texts:
        token_ids = torch.tensor(text, device=device)
        found = {name: logprobs_of(model, token_ids, rounded=kinds[name][2]) for name, model in models.items()}
        following = token_ids[1:, None]
        chosen = {name: each[:-1].gather(1, following) for name, each in found.items()}
        for name, each in chosen.items():
            losses[name].append(-each)
        for mine, theirs in compared:
            difference = (chosen[mine] - chosen[theirs]).abs()[:, 0]
            divergence = (found[theirs].exp() * (found[theirs] - found[mine])).sum(-1)[:-1]
            same = (found[mine].argmax(-1) == found[theirs].argmax(-1))[:-1].float()
            compared[mine, theirs].append(torch.stack((difference, divergence, same)))
    perplexity = {name: round(float(torch.cat(each).mean().exp()), 4) for name, each in losses.items()}
    rows = []
    for (mine, theirs), parts in compared.items():
        difference, divergence, same = torch.cat(parts, dim=1).mean(dim=1).tolist()
        row = {"of": mine, "against": theirs, "mean_abs_logprob_difference": round(difference, 5)}
        row |= {"mean_divergence": round(divergence, 6), "top1_agreement": round(same, 4)}
        print("  ".join(f"{name} {value}" for name, value in row.items()))
        rows.append(row)
    tokens = sum(len(text) - 1 for text in texts)
    report({"model": card.name, "device": str(device), "tokens": tokens, "perplexity": perplexity, "compared": rows})


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
