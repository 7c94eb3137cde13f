"""From flags to a runner that has proved itself: device, weights, cache, and every kernel compiled."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import structlog
import torch

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.host import resources as host
from services.common.model import files as model_files
from services.common.model.json_object import read_json
from services.common.plan.types import Admission, Batch, Limits
from services.worker.attention import flashinfer_spans
from services.worker.attention.base import AttentionBackend
from services.worker.attention.factory import make_attention
from services.worker.attention.kv_cache import KvCache
from services.worker.boot.compilation import (
    compile_model,
    forbid_recompilation,
    mark_ready,
    refusing_what_cannot_be_compiled,
)
from services.worker.boot.precompile.background import KernelCompiler
from services.worker.boot.precompile.job import Gpu, Job
from services.worker.boot.progress import BootProgress
from services.worker.boot.rehearsal import PLAIN, decodes, every_feature, mixed, step
from services.worker.described.choices import NAMES, Device, FlagChoice, agree, choose
from services.worker.described.config import ModelConfig
from services.worker.described.memory import rotation_bytes, weight_bytes
from services.worker.described.ranks import ALONE, Ranks
from services.worker.described.refusals import refuse_cuda_only_flags, refuse_too_large_weights
from services.worker.described.registry import read_model_config
from services.worker.described.rope import describe_scaling
from services.worker.described.shares import local_config, refuse_unshareable
from services.worker.described.stages import layers_of
from services.worker.layers.factory import make_kernels, make_linear
from services.worker.layers.fp8 import FP8
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel
from services.worker.parallel.errors import ParallelError
from services.worker.parallel.exchange import make_exchanges
from services.worker.parallel.group import RankGroup
from services.worker.parallel.rendezvous import INSTALLED
from services.worker.runner.base import Runner
from services.worker.runner.runner import StepRunner
from services.worker.runner.shards import ShardThreads
from services.worker.runner.stage_runner import StageRunner
from services.worker.sampling.grammars import SlotGrammars, load_grammars

# More parts of a step than any schedule for a pipeline has.
_MAX_MICRO_BATCHES = 128
# What all workers of a replica must have alike: they run the same plans.
_SHARED_FLAGS = (
    *("model", "tp_size", "pp_size", "pp_layers", "dp_rank", "dtype", "load_format", "quantization"),
    *("kv_cache_dtype", "page_size", "max_context_tokens", "piecewise_cudagraph_max_tokens", "async_tp_threshold"),
    *NAMES,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Booted:
    """What the server needs to know of a runner that is ready."""

    runner: Runner
    model: str
    device: str
    dtype: str
    ranks: Ranks = ALONE
    group: RankGroup | None = None  # the other workers of the replica; closed with the runner
    choices: tuple[FlagChoice, ...] = ()  # the flags that can be ``auto``, with their values and reasons


def boot(
    config: WorkerConfig,
    on_lost: Callable[[ParallelError], None] | None = None,
    progress: BootProgress | None = None,
    compiler: KernelCompiler | None = None,
) -> Booted:
    """Load the model and run every kind of step, in the thread that will run the steps.

    ``on_lost`` is called, in any thread, if the replica cannot continue. It may be called as soon as the workers of the
    replica are connected, since a rank may wait for another rank for ever. ``progress`` reports the phases.
    ``compiler`` compiles kernels meanwhile, and is closed at the end. Raises ``InvalidRequest``, which names the flag
    and the fix.
    """
    progress = progress or BootProgress()
    started = time.perf_counter()
    device = _device(config)
    if device.type == "cpu":
        refuse_cuda_only_flags(config)
    dtype = _dtype(config, device)
    ranks = Ranks(config.tp_rank, config.tp_size, config.pp_rank, config.pp_size)
    card, described = read_model(config)
    if device.type == "cuda":
        from services.worker.boot.cuda import make_runner  # loads Triton

        _load_flashinfer(described.head_dim, cache_dtype(config, dtype))
    max_context = described.max_context_tokens
    log.info("rope", kind=described.rope.kind, scaling=describe_scaling(described.rope, max_context))
    refuse_unshareable(described, ranks.tp_size)
    layers = layers_of(described, ranks.pp_size, config.pp_layers)[ranks.pp_rank]
    if config.load_format != "dummy":
        weights.check(card.directory, described)
    with contextlib.ExitStack() as undo, contextlib.closing(compiler) if compiler else contextlib.nullcontext():
        with progress.phase("replica") if not ranks.alone else contextlib.nullcontext():
            group = _join_replica(config, ranks, device, dtype, described.head_dim)
        if group is not None:
            undo.callback(group.close)
            if on_lost is not None:
                group.watch(on_lost)
        facts = _facts(device, group)
        chosen, choices = choose(config, facts, described, ranks, layers, max_context)
        if group is not None:
            chosen, choices = agree(chosen, choices, group.least)
        if device.type == "cpu" and config.kv_cache_num_tokens == "auto" and chosen.page_count == 1:
            raise InvalidRequest(
                f"flag model={config.model}: its weights leave no memory for a KV cache ({facts.free / 2**30:.1f} GiB"
                " are free); use a smaller model, dtype=bfloat16, or end other programs",
                field="model",
            )
        needed = weight_bytes(described, ranks, layers, dtype.itemsize, config.quantization)
        refuse_too_large_weights(config.model, needed + rotation_bytes(described), facts.total)
        if compiler is not None and device.type == "cuda" and not chosen.torch_compile:
            installed = flashinfer_spans.installed(described.head_dim, cache_dtype(chosen, dtype))
            gpu = Gpu(facts.name, facts.capability, facts.total, installed)
            compiler.compile(Job(config=chosen, dtype=_name(dtype), gpu=gpu))
        threads = _threads(chosen, device, ranks)
        model = make_model(chosen, described, dtype, device, ranks, layers)
        with progress.phase("weights"):
            if config.load_format == "dummy":
                weights.load_dummy(model, seed=0)
            else:
                tied = described.tied_embeddings
                weights.load(
                    card.directory, model.targets(), tied_embeddings=tied, ignored=model.names_of_other_ranks()
                )
        log.info("weights loaded", model=card.name, device=str(device), seconds=round(time.perf_counter() - started, 2))
        grammars = _load_grammars(config, card, group)
        if chosen.torch_compile:
            compile_model(model)
        with refusing_what_cannot_be_compiled() if chosen.torch_compile else contextlib.nullcontext():
            if device.type == "cuda":
                runner: Runner = make_runner(chosen, model, max_context, group, grammars, progress)
            else:
                with progress.phase("compile" if chosen.torch_compile else "rehearsal"):
                    runner = _make_cpu_runner(chosen, model, threads, max_context, group, grammars)
        mark_ready()
        if config.fail_on_recompile:
            forbid_recompilation()
        undo.pop_all()
    progress.finish()
    log.info("model ready", model=card.name, device=str(device), seconds=round(time.perf_counter() - started, 2))
    choices = _with_cache_size(choices, runner.limits)
    if not (ranks.tp_rank or ranks.pp_rank or config.dp_rank):
        log.info("settings", device=facts.name, **{each.name: each.value for each in choices})
    return Booted(runner, card.name, str(device), _name(dtype), ranks, group, choices)


def read_model(config: WorkerConfig) -> tuple[model_files.ModelCard, ModelConfig]:
    """Return the files of the model that ``config`` names, and its description with the context that ``config`` allows.

    Raises ``InvalidRequest`` naming the file or flag."""
    card = model_files.read_card(config.model, config.served_model_name, weights=config.load_format != "dummy")
    described = read_model_config(read_json(card.directory / "config.json", required=True))
    return card, replace(described, max_context_tokens=_max_context(config, described.max_context_tokens))


def make_model(
    config: ChosenWorkerConfig,
    described: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    layers: range,
    *,
    memory: torch.device | None = None,
) -> DecoderModel:
    """Return a rank's ``layers`` of the model, without values. ``memory``: where its tensors are, ``device`` unless it
    is given."""
    kernels = make_kernels(device, dtype, compiled=config.torch_compile)
    local = local_config(described, ranks, layers)
    linear = make_linear(local, dtype, device, config.quantization, ranks.tp_size)
    adds = device.type == "cuda" and config.quantization == "none" and ranks.tp_size == 1
    where = memory or device
    return DecoderModel(described, dtype, where, kernels, linear, adds_in_product=adds, ranks=ranks, layers=layers)


def _load_flashinfer(head_dim: int, dtype: torch.dtype) -> None:
    """Load FlashInfer in a thread. It takes 2 s, in which this thread waits for the driver and for weights."""
    arguments = (head_dim, dtype)
    threading.Thread(target=flashinfer_spans.available, args=arguments, name="load FlashInfer", daemon=True).start()


def _facts(device: torch.device, group: RankGroup | None) -> Device:
    """Return what is known of ``device`` before anything is loaded. Ranks take the least of their sizes, so that all
    of them choose alike."""
    if device.type == "cpu":
        free, processors = host.available_memory(), host.usable_processors()
        name, total, capability = "CPU", free, (0, 0)
    else:
        free, total = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
        name, processors = properties.name, properties.multi_processor_count
        capability = (properties.major, properties.minor)
    if group is not None:
        free, total, processors = (group.least(each) for each in (free, total, processors))
    return Device("cpu" if device.type == "cpu" else "cuda", name, free, total, processors, capability)


def _with_cache_size(choices: tuple[FlagChoice, ...], limits: Limits) -> tuple[FlagChoice, ...]:
    """Return ``choices`` with the size of the cache that was made."""
    size = str(limits.page_count * limits.page_size)
    return tuple(each._replace(value=size) if each.value == "auto" else each for each in choices)


def _load_grammars(config: WorkerConfig, card: model_files.ModelCard, group: RankGroup | None) -> SlotGrammars | None:
    """None where this rank, or another of the replica, has no tokenizer that grammars can be followed with."""
    found = load_grammars(config.tokenizer or str(card.directory), card)
    everyone = found is not None if group is None else group.least(int(found is not None))
    reports = group is None or group.ranks.reports
    return SlotGrammars(found, card.vocab_size, reports=reports) if found is not None and everyone else None


def make_limits(
    config: ChosenWorkerConfig, model: DecoderModel, page_count: int, max_context: int, **more: Any
) -> Limits:
    """What plans must fit into, with a cache of ``page_count`` pages."""
    return Limits(
        page_size=config.page_size,
        page_count=page_count,
        max_slots=config.max_seqs_per_forward,
        max_tokens_per_step=config.max_tokens_per_forward,
        max_context_tokens=min(max_context, page_count * config.page_size),
        vocab_size=model.config.vocab_size,
        max_top_logprobs=config.max_top_logprobs,
        **more,
    )


def make_cache(config: WorkerConfig, model: DecoderModel, page_count: int) -> KvCache:
    """A cache for ``model``, on its device."""
    local = model.local
    return KvCache(
        layers=len(local.layers),
        page_count=page_count,
        page_size=config.page_size,
        kv_heads=local.kv_heads,
        head_dim=local.head_dim,
        dtype=cache_dtype(config, model.dtype),
        device=model.device,
    )


def cache_dtype(config: WorkerConfig, dtype: torch.dtype) -> torch.dtype:
    """Return what the keys and values of a model of ``dtype`` are kept as."""
    return FP8 if config.kv_cache_dtype == "fp8" else dtype


def _make_cpu_runner(
    config: ChosenWorkerConfig,
    model: DecoderModel,
    threads: ShardThreads,
    max_context: int,
    group: RankGroup | None,
    grammars: SlotGrammars | None,
) -> StepRunner:
    """A runner that has run every kind of step."""
    from services.worker.models.fused_cpu import FusedDecoder, supports  # loads numba

    page_count = cast(int, config.page_count)  # ``auto`` has a value on CPUs
    cache = make_cache(config, model, page_count)
    attention = make_attention(
        cache, model.local.heads, [layer.attention for layer in model.local.layers], compiled=config.torch_compile
    )
    if group is not None:
        return _make_stage_runner(config, model, cache, attention, max_context, group, grammars)
    fused = FusedDecoder(model, cache) if supports(model) else None
    limits = make_limits(config, model, page_count, max_context, grammars=grammars is not None)
    runner = StepRunner(model, cache, attention, limits, threads, fused, grammars)
    warm_up(runner)
    return runner


def _make_stage_runner(
    config: ChosenWorkerConfig,
    model: DecoderModel,
    cache: KvCache,
    attention: AttentionBackend,
    max_context: int,
    group: RankGroup,
    grammars: SlotGrammars | None,
) -> StepRunner:
    """One of several ranks, all of which have run every kind of step together."""
    parts = _MAX_MICRO_BATCHES if group.ranks.pp_size > 1 else 1
    more = {"max_micro_batches": parts, "grammars": grammars is not None}
    limits = make_limits(config, model, cache.page_count, max_context, **more)
    exchanges = make_exchanges(group.ranks, model.config.hidden_size * model.dtype.itemsize)
    runner = StageRunner(model, cache, attention, limits, group, exchanges, grammars if model.last else None)
    group.wait_for_all()
    warm_up(runner)
    longest = min(limits.max_context_tokens, limits.max_tokens_per_step)
    for tokens in exchanges.begins:
        if tokens <= longest:
            for plan in mixed(limits, 0, 1, tokens, PLAIN):
                runner.run(plan)
            runner.reset()
    return runner


def warm_up(runner: StepRunner) -> None:
    """A prefill, a mixed step and decodes with every sampling feature, so that nothing is compiled while serving."""
    limits = runner.limits
    rows = min(limits.max_slots, limits.page_count, limits.max_tokens_per_step, 16)
    tokens = min(max(1, limits.page_size - 1), limits.max_context_tokens, limits.max_tokens_per_step // rows)
    page = np.zeros(1, np.int64)
    both = every_feature(limits), PLAIN
    admissions = tuple(Admission(row, np.zeros(tokens, np.int64), 0, page + row, both[row % 2]) for row in range(rows))
    everyone = np.arange(rows)
    runner.run(step(1, Batch(everyone, np.full(rows, tokens)), admissions))
    if tokens < min(limits.page_size, limits.max_context_tokens):
        runner.run(step(2, Batch(everyone, np.ones(rows, np.int64))))
    runner.reset()
    # A single token is a size of its own to compilers.
    for plan in decodes(limits, 1, PLAIN):
        runner.run(plan)
    runner.reset()


def _device(config: WorkerConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("flag device=cuda: torch sees no CUDA device here; use device=cpu", field="device")
    return torch.device("cuda:0" if name == "cuda" else "cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    automatic = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, automatic if config.dtype == "auto" else config.dtype)
    return dtype


def _join_replica(
    config: WorkerConfig, ranks: Ranks, device: torch.device, dtype: torch.dtype, head_dim: int
) -> RankGroup | None:
    """The other workers of the replica, once all have come; None = there are none."""
    if ranks.alone:
        return None
    settings = config.model_dump(mode="json", include=set(_SHARED_FLAGS))
    settings |= {"device": device.type, "dtype": _name(dtype)}
    # Whether a step is a graph depends on it, and ranks must agree.
    settings |= {INSTALLED: device.type == "cuda" and flashinfer_spans.available(head_dim, dtype)}
    return RankGroup(ranks, config.master_addr, config.master_port, device, settings)


def _threads(config: ChosenWorkerConfig, device: torch.device, ranks: Ranks) -> ShardThreads:
    """On a CPU each part of a batch has a thread of its own, so torch's operators need no more."""
    if device.type != "cpu":
        return ShardThreads(1)
    cores = len(os.sched_getaffinity(0))
    if not ranks.alone:  # one thread calls the collectives, on all ranks in one order
        torch.set_num_threads(config.torch_num_threads or max(1, cores // ranks.size))
        return ShardThreads(1)
    wanted = config.torch_num_threads or cores
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
