"""From flags to a runner that has proved itself: device, weights, cache, and every kernel compiled."""

import contextlib
import os
import time
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from services.common import model_files
from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.worker import matmul_cpu, weights
from services.worker.attention.factory import make_attention
from services.worker.compilation import compile_model, refusing_what_cannot_be_compiled
from services.worker.kv_cache import KvCache
from services.worker.layers.fast_cpu import FastCpuKernels, make_kernels
from services.worker.models.decoder import DecoderModel
from services.worker.models.fused_cpu import FusedDecoder
from services.worker.models.registry import read_model_config
from services.worker.runner.plan import Admission, Batch, Limits, Plan, SamplingSettings
from services.worker.runner.runner import StepRunner
from services.worker.runner.shards import ShardThreads

MAX_TOP_LOGPROBS = 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Booted:
    """What the server needs to know of a runner that is ready."""

    runner: StepRunner
    model: str
    device: str
    dtype: str


def boot(config: WorkerConfig) -> Booted:
    """Load and warm up; run in the thread that will run the steps. Raises ``InvalidRequest`` naming flag and fix."""
    started = time.perf_counter()
    device = _device(config)
    dtype = _dtype(config, device)
    threads = _threads(config, device)
    card = model_files.read_card(config.model, config.served_model_name, weights=True)
    described = read_model_config(model_files.read_json(card.directory / "config.json", required=True))

    page_size, page_count = config.page_size, config.page_count
    limits = Limits(
        page_size=page_size,
        page_count=page_count,
        max_slots=config.max_seqs_per_forward,
        max_tokens_per_step=config.max_tokens_per_forward,
        max_context_tokens=min(_max_context(config, described.max_context_tokens), page_count * page_size),
        vocab_size=described.vocab_size,
        max_top_logprobs=MAX_TOP_LOGPROBS,
    )
    kernels = make_kernels(device, dtype, compiled=config.torch_compile)
    model = DecoderModel(described, dtype, device, kernels)
    weights.load(card.directory, model.targets(), tied_embeddings=described.tied_embeddings)
    if config.torch_compile:
        compile_model(model)
    cache = KvCache(
        layers=described.layers,
        page_count=page_count,
        page_size=page_size,
        kv_heads=described.kv_heads,
        head_dim=described.head_dim,
        dtype=dtype,
        device=device,
    )
    attention = make_attention(cache, described.heads, compiled=config.torch_compile)
    fused = None
    if isinstance(kernels, FastCpuKernels) and matmul_cpu.available():
        fused = FusedDecoder(model, cache)
    runner = StepRunner(model, cache, attention, limits, threads, fused)
    with refusing_what_cannot_be_compiled() if config.torch_compile else contextlib.nullcontext():
        warm_up(runner)
    log.info("model ready", model=card.name, device=str(device), seconds=round(time.perf_counter() - started, 2))
    return Booted(runner, card.name, str(device), str(dtype).removeprefix("torch."))


def warm_up(runner: StepRunner) -> None:
    """A prefill, a mixed step and decodes with every sampling feature, so that nothing is compiled while serving."""
    limits = runner.limits
    rows = min(limits.max_slots, limits.page_count, limits.max_tokens_per_step, 16)
    tokens = min(max(1, limits.page_size - 1), limits.max_context_tokens, limits.max_tokens_per_step // rows)
    none = np.empty(0, np.int64)

    def plan(step: int, batch: Batch | None, admissions: tuple[Admission, ...] = ()) -> Plan:
        return Plan(step, none, admissions, none, none, none, none, batch)

    plain = SamplingSettings(0.0, 1.0, 0, 0.0, 0, 0, False, 0, none, np.empty(0, np.float32))
    bias = np.zeros(1, np.int64), np.zeros(1, np.float32)
    full = SamplingSettings(0.7, 0.9, 5, 0.05, 1, 1, True, min(MAX_TOP_LOGPROBS, limits.vocab_size), *bias)
    page = np.zeros(1, np.int64)
    admissions = tuple(
        Admission(row, np.zeros(tokens, np.int64), 0, page + row, plain if row % 2 else full) for row in range(rows)
    )
    everyone = np.arange(rows)
    runner.run(plan(1, Batch(everyone, np.full(rows, tokens)), admissions))
    if tokens < min(limits.page_size, limits.max_context_tokens):
        runner.run(plan(2, Batch(everyone, np.ones(rows, np.int64))))
    runner.reset()
    # A single token is a size of its own to compilers.
    single = Admission(0, np.zeros(1, np.int64), 0, page, plain)
    runner.run(plan(1, Batch(np.zeros(1, np.int64), np.ones(1, np.int64)), (single,)))
    runner.reset()


def _device(config: WorkerConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("flag device=cuda: torch sees no CUDA device here; use device=cpu", field="device")
    return torch.device("cuda:0" if name == "cuda" else "cpu")


def _dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    automatic = "float32" if device.type == "cpu" else "bfloat16"
    return getattr(torch, automatic if config.dtype == "auto" else config.dtype)


def _threads(config: WorkerConfig, device: torch.device) -> ShardThreads:
    """On a CPU each part of a batch has a thread of its own, so torch's operators need no more."""
    if device.type != "cpu":
        return ShardThreads(1)
    wanted = config.torch_num_threads or len(os.sched_getaffinity(0))
    if config.torch_compile:  # one compiled graph for the whole batch
        torch.set_num_threads(wanted)
        return ShardThreads(1)
    torch.set_num_threads(1)
    return ShardThreads(wanted)


def _max_context(config: WorkerConfig, model_limit: int) -> int:
    if config.max_context_tokens is None:
        return model_limit
    if config.max_context_tokens > model_limit:
        raise InvalidRequest(
            f"flag max_context_tokens={config.max_context_tokens}: the model's own limit is {model_limit};"
            " lower it or leave it out",
            field="max_context_tokens",
        )
    return config.max_context_tokens
