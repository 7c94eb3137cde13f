"""A lower bound of the time of a step on a device: its arithmetic and its bytes, divided by measured rates."""

from dataclasses import dataclass

import torch

from bench.step_sizes import StepSizes
from services.worker.described.config import ModelConfig
from services.worker.described.layer import ExpertsConfig

PARTS = (
    "layer products", "experts", "vocabulary head", "attention own", "attention prefix", "attention chunks", "store",
    "norms", "activation", "sampling", "copies", "rest",
)  # fmt: skip
_BF16 = 2  # bytes
_SIDE = 8192  # rows and columns of the multiplied matrices
_COPIED = 256 << 20  # bytes
_ROUNDS = 20


@dataclass(frozen=True)
class Rates:
    """The rates of a device, per second."""

    bf16: float  # floating-point operations
    fp8: float | None  # None = the device has no fp8 products
    copy: float  # bytes read and written


def measure_rates() -> Rates:
    """Measure the rates of large products and of a large copy. Frees the memory that it used."""
    try:
        x, y = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(x)
        work = 2 * _SIDE**3
        bf16 = work / _seconds(lambda: torch.mm(x, y.t(), out=out))
        fp8 = None
        if torch.cuda.get_device_capability() >= (9, 0):
            rows, columns = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
            ones = torch.ones(_SIDE, 1, device="cuda"), torch.ones(1, _SIDE, device="cuda")
            fp8 = work / _seconds(
                lambda: torch._scaled_mm(
                    rows, columns.t(), scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16, use_fast_accum=True
                )
            )
            del rows, columns
        source = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return Rates(bf16, fp8, 2 * _COPIED / _seconds(lambda: target.copy_(source)))
    finally:
        x = y = out = source = target = rows = columns = None
        torch.cuda.empty_cache()


def _seconds(run) -> float:
    """Return the mean seconds of many runs."""
    for _ in range(3):
        run()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(_ROUNDS):
        run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000 / _ROUNDS


def least_ms(
    sizes: StepSizes, model: ModelConfig, rates: Rates, *, fp8: bool = False, fp8_cache: bool = False
) -> dict[str, float]:
    """Return milliseconds by part. Each operator is assumed to read and write its values once, in bf16.

    Weights are in fp8 with ``fp8``, and keys and values in the cache with ``fp8_cache``.

    The last layer is counted for all tokens, although only sampled tokens continue after its attention. All experts are
    assumed to be equally likely. With unequal probabilities, steps of few tokens read fewer weights.
    """
    tokens, samples, layers = sizes.tokens, sizes.samples, len(model.layers)
    hidden, wide, dense = model.hidden_size, model.intermediate_size, layers - len(model.experts)
    queries, kv = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    weight_bytes, rate = (1, rates.fp8 or rates.bf16) if fp8 else (_BF16, rates.bf16)
    cached = kv * (1 if fp8_cache else _BF16) * layers  # bytes of a token in the cache

    def product(rows: int, *shapes: tuple[int, int]) -> float:
        """Return the time of products of the given shapes, each bound by arithmetic or by memory."""
        return sum(
            max(
                2 * rows * inputs * outputs / rate,
                (weight_bytes * inputs * (outputs + rows) + _BF16 * rows * outputs) / rates.copy,
            )
            for inputs, outputs in shapes
            if rows
        )

    def attention(pairs: int, context: int, rows: int) -> float:
        work = 4 * pairs * queries * layers / rates.bf16
        return max(work, (context * cached + 2 * rows * queries * _BF16 * layers) / rates.copy)

    def mixture(experts: ExpertsConfig) -> float:
        size = 3 * hidden * experts.width
        read = experts.count * (1 - (1 - experts.chosen / experts.count) ** tokens)
        return max(2 * tokens * experts.chosen * size / rate, read * size * weight_bytes / rates.copy)

    singles = tokens - sizes.chunk_tokens
    in_groups = singles if sizes.prefix_pairs else 0
    seconds = {
        "layer products": layers * product(tokens, (hidden, queries + kv), (queries, hidden))
        + dense * product(tokens, (hidden, 2 * wide), (wide, hidden))
        + sum(product(tokens, (hidden, 3 * each.shared_width)) for each in model.experts),
        "experts": sum(map(mixture, model.experts)),
        "vocabulary head": product(samples, (hidden, model.vocab_size)),
        "attention own": attention(sizes.own_context, sizes.own_context, singles),
        "attention prefix": attention(sizes.prefix_pairs, sizes.prefix_tokens, in_groups),
        "attention chunks": attention(sizes.chunk_pairs, sizes.chunk_context, sizes.chunk_tokens),
        "store": tokens * ((2 * queries + kv) * _BF16 * layers + cached) / rates.copy,
        "norms": 2 * tokens * hidden * _BF16 * (2 * layers + 1) / rates.copy,
        "activation": 3 * tokens * wide * _BF16 * dense / rates.copy,
        "sampling": samples * model.vocab_size * _BF16 / rates.copy,
        "copies": 0.0,
        "rest": 0.0,
    }
    return {name: 1000 * value for name, value in seconds.items()}
