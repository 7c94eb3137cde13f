"""The boot: makes a runner from flags. Chooses the device, loads weights, sizes the cache and compiles every kernel."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import structlog
import torch

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.host import resources as host
from services.common.model import files as model_files
from services.common.plan.types import Admission, Batch, Plan, WorkerLimits
from services.worker.arena.memory import ModelMemory
from services.worker.arena.tensor_arena import TensorArena
from services.worker.attention import flashinfer_spans
from services.worker.attention.factory import make_attention
from services.worker.attention.kv_cache import KvCache
from services.worker.boot.compilation import (
    compile_model,
    forbid_recompilation,
    mark_ready,
    refusing_what_cannot_be_compiled,
)
from services.worker.boot.precompile.background import KernelCompiler
from services.worker.boot.precompile.job import GpuTarget, Job
from services.worker.boot.progress import BootProgress
from services.worker.boot.rehearsal import PLAIN, decodes, every_feature, mixed
from services.worker.boot.replica import join_replica
from services.worker.boot.sources import open_model
from services.worker.described.choices import (
    Device,
    FlagChoice,
    agree,
    choose,
    refuse_impossible_quantization,
    settings_of,
)
from services.worker.described.heads import laid_out
from services.worker.described.memory import rotation_bytes, routed_layout, weight_bytes
from services.worker.described.ranks import ALONE, Ranks
from services.worker.described.refusals import (
    refuse_cuda_only_flags,
    refuse_too_large_weights,
    refuse_unrecordable_experts,
)
from services.worker.described.rope import describe_scaling
from services.worker.described.shares import refuse_unshareable
from services.worker.described.stages import layers_of
from services.worker.layers.fp8 import FP8
from services.worker.models.base import ModelSource, RankModel
from services.worker.models.expert_load import ExpertLoad
from services.worker.parallel.errors import ParallelError
from services.worker.parallel.exchange import make_exchanges
from services.worker.parallel.group import RankGroup
from services.worker.runner.base import Runner
from services.worker.runner.peers import Peers
from services.worker.runner.routed_experts import ExpertRecorder
from services.worker.runner.runner import StepRunner
from services.worker.runner.shards import ShardThreads
from services.worker.sampling.grammars import SlotGrammars, load_grammars

# More micro-batches than any pipeline schedule uses.
_MAX_MICRO_BATCHES = 128

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Booted:
    """A runner that is ready, with the facts about it that the server publishes."""

    runner: Runner
    model: str
    device: str
    dtype: str
    ranks: Ranks = ALONE
    group: RankGroup | None = None  # connections to the other ranks; closed with the runner. None = one rank
    expert_load: ExpertLoad | None = None  # None = the model has no experts
    loaded: "Loaded | None" = None  # None = the weights are not accessible
    choices: tuple[FlagChoice, ...] = ()  # the flags that can be ``auto``, with their values and reasons


class Loaded(NamedTuple):
    """A model, and where it is from."""

    source: ModelSource
    model: RankModel
    directory: Path
    dummy: bool  # the weights are random, and not those in the directory
    memory: ModelMemory | None  # None = the worker cannot sleep


class RunnerParts(NamedTuple):
    """The parts from which the runner of a rank is made."""

    config: ChosenWorkerConfig
    model: RankModel
    group: RankGroup | None = None  # None = one rank
    grammars: SlotGrammars | None = None  # None = not supported, or this rank does not report
    mask_words: int = 0  # of a grammar's mask; 0 = grammars are not supported
    arena: TensorArena | None = None  # of the KV cache; None = the cache is never given back


def boot(
    config: WorkerConfig,
    on_lost: Callable[[ParallelError], None] | None = None,
    progress: BootProgress | None = None,
    compiler: KernelCompiler | None = None,
) -> Booted:
    """Load the model and run every kind of step. Call it in the thread that will run the steps.

    ``on_lost`` is called, in any thread, if the replica cannot continue. This can happen as soon as its workers are
    connected, while this call waits for another rank. ``progress`` reports the phases. ``compiler`` compiles kernels
    during the boot, and is closed at the end. Raises ``InvalidRequest``, which names the flag and the fix.
    """
    progress = progress or BootProgress()
    started = time.perf_counter()
    device = _device(config)
    if device.type == "cpu":
        refuse_cuda_only_flags(config)
    dtype = _dtype(config, device)
    ranks = Ranks(config.tp_rank, config.tp_size, config.pp_rank, config.pp_size, config.expert_parallel)
    card, source = open_model(config, dtype)
    described = laid_out(source.described, device.type)
    if device.type == "cuda":
        from services.worker.boot.cuda import disable_uncapturable_graphs, make_runner  # loads Triton

        # FlashInfer takes 2 s to load, while this thread waits for the driver and for weights.
        arguments = described.head_dim, cache_dtype(config, dtype)
        threading.Thread(target=flashinfer_spans.available, args=arguments, name="load FlashInfer", daemon=True).start()
    for rope in described.ropes:
        log.info("rope", kind=rope.kind, scaling=describe_scaling(rope, described.max_context_tokens))
    refuse_unshareable(described, ranks.tp_size, expert_parallel=ranks.whole_experts)
    if config.return_routed_experts:
        refuse_unrecordable_experts(described)
    layers = layers_of(described, ranks.pp_size, config.pp_layers)[ranks.pp_rank]
    if config.load_format != "dummy":
        source.check()
    with contextlib.ExitStack() as undo, contextlib.closing(compiler) if compiler else contextlib.nullcontext():
        with progress.phase("replica") if not ranks.alone else contextlib.nullcontext():
            group = join_replica(config, ranks, device, dtype, described.head_dim, card.directory)
        if group is not None:
            undo.callback(group.close)
            if on_lost is not None:
                group.watch(on_lost)
        facts = device_facts(device, group)
        refuse_impossible_quantization(config, facts, described, ranks)
        chosen, choices = choose(config, facts, described, ranks, layers)
        if group is not None:
            chosen, choices = agree(chosen, choices, group.least)
        if device.type == "cpu" and config.kv_cache_num_tokens == "auto" and chosen.page_count == 1:
            raise InvalidRequest(
                f"flag model={config.model}: its weights leave no memory for a KV cache ({facts.free / 2**30:.1f} GiB"
                " are free); use a smaller model, dtype=bfloat16, or end other programs",
                field="model",
            )
        needed = weight_bytes(described, ranks, layers, dtype.itemsize, chosen.quantization, device.type)
        refuse_too_large_weights(config.model, needed + rotation_bytes(described), facts.total)
        if compiler is not None and device.type == "cuda" and not (chosen.torch_compile or described.foreign):
            installed = flashinfer_spans.installed(described.head_dim, cache_dtype(chosen, dtype))
            gpu = GpuTarget(facts.name, facts.capability, facts.total, installed)
            compiler.compile(Job(config=chosen, dtype=_name(dtype), gpu=gpu))
        threads = _threads(chosen, device, ranks)
        model = source.make(chosen, described, dtype, device, ranks, layers)
        with progress.phase("weights"):
            source.fill(model, dummy=config.load_format == "dummy")
        if device.type == "cuda":
            chosen, choices = disable_uncapturable_graphs(config.use_cudagraphs, chosen, choices, model)
        log.info("weights loaded", model=card.name, device=str(device), seconds=round(time.perf_counter() - started, 2))
        memory, cache_arena = _move_weights(source, model)
        parts = RunnerParts(chosen, model, group, *_load_grammars(config, card, group), cache_arena)
        if chosen.torch_compile:
            compile_model(model)
        with refusing_what_cannot_be_compiled() if chosen.torch_compile else contextlib.nullcontext():
            if device.type == "cuda":
                runner: Runner = make_runner(parts, progress)
            else:
                with progress.phase("compile" if chosen.torch_compile else "rehearsal"):
                    runner = _make_cpu_runner(parts, threads)
        mark_ready()
        if config.fail_on_recompile:
            forbid_recompilation()
        undo.pop_all()
    progress.finish()
    log.info("model ready", model=card.name, device=str(device), seconds=round(time.perf_counter() - started, 2))
    cache_tokens = str(runner.limits.page_count * runner.limits.page_size)
    choices = tuple(each._replace(value=cache_tokens) if each.value == "auto" else each for each in choices)
    if not (ranks.tp_rank or ranks.pp_rank or config.dp_rank):
        log.info("settings", device=facts.name, **settings_of(described, choices))
    load = ExpertLoad.of(model)
    loaded = Loaded(source, model, card.directory, config.load_format == "dummy", memory)
    return Booted(runner, card.name, str(device), _name(dtype), ranks, group, load, loaded, choices)


def device_facts(device: torch.device, group: RankGroup | None) -> Device:
    """Return the properties of ``device`` before the model is loaded.

    Sizes and capability are the smallest of all ranks, so that the ranks choose equal settings.
    """
    if device.type == "cpu":
        free, processors = host.available_memory(), host.usable_processors()
        name, total, capability = "CPU", free, (0, 0)
    else:
        free, total = torch.cuda.mem_get_info(device)
        found = torch.cuda.get_device_properties(device)
        name, processors, capability = found.name, found.multi_processor_count, (found.major, found.minor)
    if group is not None:
        free, total, processors = (group.least(each) for each in (free, total, processors))
        capability = divmod(group.least(100 * capability[0] + capability[1]), 100)
    return Device("cpu" if device.type == "cpu" else "cuda", name, free, total, processors, capability)


def _load_grammars(
    config: WorkerConfig, card: model_files.ModelCard, group: RankGroup | None
) -> tuple[SlotGrammars | None, int]:
    """Return the grammars if this rank reports, and the words of a mask, or 0 if grammars are not supported."""
    if group is not None and not group.ranks.reports:
        return None, group.least(sys.maxsize)
    found = load_grammars(config.tokenizer or str(card.directory), card)
    grammars = None if found is None else SlotGrammars(found, card.vocab_size)
    words = 0 if grammars is None else grammars.words
    return grammars, words if group is None else group.least(words)


def make_limits(
    config: ChosenWorkerConfig, model: RankModel, page_count: int, *, hydragen: bool = False, **more: Any
) -> WorkerLimits:
    """Return the limits of plans for a cache of ``page_count`` pages. ``more`` sets further fields of ``WorkerLimits``.

    ``hydragen`` is true if the attention backend reads shared prefixes once. Layers with a window ignore them.
    """
    window_tokens = model.config.window_tokens
    return WorkerLimits(
        page_size=config.page_size,
        page_count=page_count,
        max_slots=config.max_seqs_per_forward,
        max_tokens_per_step=config.max_tokens_per_forward,
        max_context_tokens=min(model.config.max_context_tokens, page_count * config.page_size),
        vocab_size=model.config.vocab_size,
        max_top_logprobs=config.max_top_logprobs,
        window_tokens=window_tokens,
        hydragen=hydragen and not window_tokens,
        routed_experts=routed_layout(model.config) if config.return_routed_experts else None,
        **more,
    )


def _move_weights(source: ModelSource, model: RankModel) -> tuple[ModelMemory | None, TensorArena | None]:
    """Move the weights into an arena. Return the memory that can sleep, and the arena of the KV cache.

    Both are None if ``source`` cannot write the weights again.
    """
    if not source.replaces_weights:
        return None, None
    weights, cache = TensorArena(model.device), TensorArena(model.device)
    weights.adopt(model.state_dict(keep_vars=True).values())
    return ModelMemory(weights, cache), cache


def make_cache(config: WorkerConfig, model: RankModel, page_count: int, arena: TensorArena | None = None) -> KvCache:
    """Return a KV cache for ``model``, on its device. ``arena`` owns its memory; None = torch does."""
    local = model.local
    return KvCache(
        layers=len(local.layers),
        page_count=page_count,
        page_size=config.page_size,
        kv_heads=local.kv_heads,
        head_dim=local.head_dim,
        dtype=cache_dtype(config, model.cache_dtype),
        device=model.device,
        allocate=None if arena is None else arena.zeros,
        routed=routed_layout(local) if config.return_routed_experts else None,
    )


def make_recorder(model: RankModel, cache: KvCache, limits: WorkerLimits, grain: int = 1) -> ExpertRecorder | None:
    """Return the recorder of the model's experts, or None if ``cache`` does not keep them.

    ``grain``: steps are padded to a multiple of it.
    """
    if cache.routed_experts is None:
        return None
    # A decode graph may have up to 128 rows more than there are slots.
    most = max(limits.max_tokens_per_step, limits.max_slots + 128)
    return ExpertRecorder(model, cache, -(-most // grain) * grain)


def cache_dtype(config: WorkerConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache for a model of ``dtype``."""
    return FP8 if config.kv_cache_dtype == "fp8" else dtype


def _make_cpu_runner(parts: RunnerParts, threads: ShardThreads) -> StepRunner:
    """Return a runner for a CPU that has run every kind of step, together with the other ranks."""
    from services.worker.models.fused_cpu import FusedDecoder, supports  # loads numba

    config, model, group, grammars, mask_words, arena = parts
    page_count = cast(int, config.page_count)  # ``choose`` replaces ``auto`` on CPUs
    cache = make_cache(config, model, page_count, arena)
    layers = model.attention_layers()
    attention = make_attention(cache, model.local.heads, layers, compiled=config.torch_compile, dtype=model.dtype)
    fused = FusedDecoder(model, cache) if supports(model) else None
    micro_batches = _MAX_MICRO_BATCHES if model.ranks.pp_size > 1 else 1
    more: dict[str, Any] = {"max_micro_batches": micro_batches, "grammars": mask_words > 0}
    limits = make_limits(config, model, page_count, **more)
    exchanges = make_exchanges(model.ranks, model.config.hidden_size * model.dtype.itemsize)
    peers = Peers(group, exchanges, model.config.hidden_size, model.dtype)
    recorder = make_recorder(model, cache, limits)
    runner = StepRunner(model, cache, attention, limits, threads, fused, grammars, peers, recorder, mask_words)
    if group is not None:
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
    """Run prefills and decodes with every sampling feature, so that no step of a request compiles."""
    limits = runner.limits
    # A single token comes first, in one thread: code of transformers may change its modules in the first step.
    # Compilers make separate code for it.
    for plan in decodes(limits, 1, PLAIN):
        runner.run(plan)
    runner.reset()
    rows = min(limits.max_slots, limits.page_count, limits.max_tokens_per_step, 16)
    tokens = min(max(1, limits.page_size - 1), limits.max_context_tokens, limits.max_tokens_per_step // rows)
    page, both = np.zeros(1, np.int64), (every_feature(limits), PLAIN)
    admissions = tuple(Admission(row, np.zeros(tokens, np.int64), 0, page + row, both[row % 2]) for row in range(rows))
    slots = np.arange(rows)
    runner.run(Plan(1, admissions=admissions, batch=Batch(slots, np.full(rows, tokens))))
    if tokens < min(limits.page_size, limits.max_context_tokens):
        runner.run(Plan(2, batch=Batch(slots, np.ones(rows, np.int64))))
    runner.reset()


def _device(config: WorkerConfig) -> torch.device:
    available = torch.cuda.is_available()
    name = ("cuda" if available else "cpu") if config.device == "auto" else config.device
    if name == "cuda" and not available:
        raise InvalidRequest("flag device=cuda: torch sees no CUDA device here; use device=cpu", field="device")
    return torch.device("cuda:0" if name == "cuda" else "cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    automatic = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, automatic if config.dtype == "auto" else config.dtype)
    return dtype


def _threads(config: ChosenWorkerConfig, device: torch.device, ranks: Ranks) -> ShardThreads:
    """Return the threads of steps, and set the number of threads of torch's operators.

    On a CPU, they run shards or share operators, and torch's operators use no further threads. Other cases have one
    thread.
    """
    if device.type != "cpu":
        return ShardThreads(1)
    cores = host.usable_processors()
    if not ranks.alone:  # one thread must call the collectives, in the same order on all ranks
        torch.set_num_threads(config.torch_num_threads or max(1, cores // ranks.size))
        return ShardThreads(1)
    wanted = config.torch_num_threads or cores
    # A compiled graph computes the whole batch, and a layer writes the experts of the whole batch.
    if config.torch_compile or config.return_routed_experts:
        torch.set_num_threads(wanted)
        return ShardThreads(1)
    torch.set_num_threads(1)
    return ShardThreads(wanted)
