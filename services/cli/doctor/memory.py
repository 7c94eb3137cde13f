"""Checks whether weights, the largest step and the KV cache fit into memory.

It uses the worker's own rules. The memory of a step is an estimate, which the worker measures at its start.
"""

from collections.abc import Iterator

from services.cli.doctor.findings import Finding, amount, fail, from_error, ok, warn
from services.cli.doctor.machine import Machine
from services.cli.doctor.model import ModelShape
from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.host.resources import available_memory
from services.worker.described.choices import (
    H200_MULTIPROCESSORS,
    Device,
    FlagChoice,
    choose,
    explained_quantization,
    refuse_impossible_quantization,
)
from services.worker.described.memory import BFLOAT16, FLOAT32, Footprint, footprint, margin, page_bytes, weight_bytes
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config

# Memory of a process on a device before it loads anything: CUDA's context and libraries.
_CONTEXT = 1 << 30
_STEP_MARGIN = 1.5  # factor of the estimate of a step's memory, to be safe


def check_memory(machine: Machine, shape: ModelShape) -> Iterator[Finding]:
    """Yield the settings that the workers would choose, and the room on the rank with the least memory."""
    if not machine.on_cuda or machine.gpus:  # sizes of MIG instances are unknown
        try:
            ranks, _ = next(_ranks(machine, shape))
            worker = machine.config.part(WorkerConfig)
            refuse_impossible_quantization(worker, _device(machine), shape.described, ranks)
        except InvalidRequest as error:
            yield from_error("flags", error.message)
            return
        found = choices(machine, shape)
        yield ok("settings", ", ".join(f"{each.name}={each.value}" for each in found))
        if (chosen := explained_quantization(shape.described, found)) is not None:
            yield ok("quantization", f"quantization={chosen.value}: {chosen.reason}")
    if not machine.on_cuda:
        yield from _on_cpu(machine, shape)
    elif machine.workers <= len(machine.gpus):
        yield from _on_cuda(machine, shape)
    # Otherwise the check of the GPUs has reported the lack.


def footprints(machine: Machine, shape: ModelShape) -> list[Footprint]:
    """Return the footprints of a replica's ranks on CUDA, with the settings that the workers would choose."""
    config, found, device = machine.config.part(WorkerConfig), [], _device(machine)
    for ranks, layers in _ranks(machine, shape):
        chosen, _ = choose(config, device, shape.described, ranks, layers)
        found.append(footprint(chosen, shape.described, ranks, layers))
    return found


def choices(machine: Machine, shape: ModelShape) -> tuple[FlagChoice, ...]:
    """Return the settings that the first worker would choose."""
    config = machine.config.part(WorkerConfig)
    ranks, layers = next(_ranks(machine, shape))
    return choose(config, _device(machine), shape.described, ranks, layers)[1]


def _ranks(machine: Machine, shape: ModelShape) -> Iterator[tuple[Ranks, range]]:
    """Yield each rank of a replica, and its layers."""
    config = machine.config
    for stage, layers in enumerate(shape.stages):
        for rank in range(config.tp_size):
            yield Ranks(rank, config.tp_size, stage, config.pp_size, config.expert_parallel), layers


def _device(machine: Machine) -> Device:
    """Return the device with the least free memory.

    NVIDIA's library does not report the number of multiprocessors, so that of an H200 is assumed.
    """
    if not machine.on_cuda:
        free = available_memory()
        return Device("cpu", "CPU", free, free, 1)
    gpus = machine.gpus[: machine.workers]
    scarcest = min(gpus, key=lambda gpu: gpu.free)
    free, capability = max(0, scarcest.free - _CONTEXT), scarcest.capability
    return Device("cuda", scarcest.name, free, scarcest.total, H200_MULTIPROCESSORS, capability)


def _on_cuda(machine: Machine, shape: ModelShape) -> Iterator[Finding]:
    config, size = machine.config, machine.config.page_size
    ranks = footprints(machine, shape)
    gpus = machine.gpus[: machine.workers]
    pairs = [(ranks[index % len(ranks)], gpu.total, gpu.free - _CONTEXT) for index, gpu in enumerate(gpus)]
    most, likely, least = (
        min(rank.pages_in(free, total, steps=steps) for rank, total, free in pairs) * size
        for steps in (0.0, 1.0, _STEP_MARGIN)
    )
    rank, total, free = min(pairs, key=lambda pair: pair[0].pages_in(pair[2], pair[1]))
    text = (
        f"each GPU: weights {amount(rank.weights)}, largest step about {amount(rank.step)}, tables and CUDA graphs"
        f" {amount(rank.reserved)}, kept free {amount(margin(total))}, of {amount(free)}"
    )
    facts = {
        "weights_bytes": rank.weights,
        "step_bytes": rank.step,
        "free_bytes": free,
        "cache_tokens_that_fit": max(0, likely),
        "bytes_per_token": rank.page // size,
    }
    requested = config.kv_cache_num_tokens
    smaller = "a GPU with more memory, tp_size= or pp_size= for more GPUs, quantization=fp8, or a smaller model"
    if most < size:
        yield fail("memory", f"{text}; nothing is left for the KV cache", smaller, **facts)
        return
    text += f"; room for about {max(0, likely):,} tokens of KV cache, {amount(max(0, likely) * rank.page / size)}"
    lower = "max_tokens_per_forward= or max_seqs_per_forward= lower"
    if requested == "auto":
        if least < shape.max_context:
            text += f", and the context is {shape.max_context:,}"
            yield warn("memory", text, f"{smaller}; or max_context_tokens={max(size, least)}", **facts)
        else:
            yield ok("memory", f"{text}, which auto takes: {_sequences(likely, shape)}", **facts)
    elif requested > most:
        fix = f"kv_cache_num_tokens={max(size, least)} or auto; or {smaller}"
        yield fail("memory", f"{text}, but kv_cache_num_tokens={requested:,} are requested", fix, **facts)
    elif requested > least:
        fix = f"kv_cache_num_tokens={max(size, least)} or auto; or {lower}"
        yield warn("memory", f"{text}; the start will show whether the requested {requested:,} fit", fix, **facts)
    else:
        yield from _fits(text, requested, shape, facts, spare=likely > 2 * requested)


def _fits(text: str, requested: int, shape: ModelShape, facts: dict[str, int], *, spare: bool) -> Iterator[Finding]:
    text += f"; {requested:,} are requested: {_sequences(requested, shape)}"
    if requested < shape.max_context:
        fix = f"kv_cache_num_tokens={shape.max_context} or more, or max_context_tokens={requested}"
        yield warn("memory", f"{text}, so longer requests are refused", fix, **facts)
    elif spare:
        yield ok("memory", f"{text} (kv_cache_num_tokens=auto takes all)", **facts)
    else:
        yield ok("memory", text, **facts)


def _sequences(tokens: int, shape: ModelShape) -> str:
    whole = tokens // shape.max_context
    if not whole:
        return f"less than one sequence of {shape.max_context:,} tokens"
    return f"{whole:,} sequence{'s' * (whole != 1)} of {shape.max_context:,} tokens at once, more of shorter ones"


def _on_cpu(machine: Machine, shape: ModelShape) -> Iterator[Finding]:
    """Check the host's memory, which all workers share. A page of the cache takes memory when it is first written."""
    config = machine.config
    item = FLOAT32 if config.dtype in ("auto", "float32") else BFLOAT16
    requested = config.kv_cache_num_tokens
    if requested == "auto":
        requested = int(next(each.value for each in choices(machine, shape) if each.name == "kv_cache_num_tokens"))
    quantization = next(each.value for each in choices(machine, shape) if each.name == "quantization")
    weights = cache = 0
    for ranks, layers in _ranks(machine, shape):
        local = local_config(shape.described, ranks, layers)
        weights += weight_bytes(shape.described, ranks, layers, item, quantization, "cpu")
        page = page_bytes(local, config.page_size, item, routed=config.return_routed_experts)
        cache += page * (requested // config.page_size)
    weights, cache, free = weights * config.dp_size, cache * config.dp_size, available_memory()
    text = f"CPU: weights {amount(weights)}, KV cache {amount(cache)} when it is full, of {amount(free)}"
    facts = {"weights_bytes": weights, "cache_bytes": cache, "free_bytes": free}
    if weights > free:
        yield fail("memory", text, "a smaller model, fewer replicas (dp_size=), or dtype=bfloat16", **facts)
    elif weights + cache > free:
        yield warn("memory", text, "lower kv_cache_num_tokens=, or end other programs", **facts)
    else:
        yield from _fits(text, requested, shape, facts, spare=False)
