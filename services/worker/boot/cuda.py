"""The part of the boot that only CUDA needs: measures memory, sizes the cache, compiles and runs every kind of step."""

import gc
import time
import traceback
from collections.abc import Iterable
from typing import Any

import structlog
import torch

from services.common.config import ChosenWorkerConfig
from services.common.errors import InvalidRequest
from services.common.plan.types import Plan
from services.worker.attention import cuda as cuda_attention
from services.worker.attention.compiled import deactivate
from services.worker.attention.cuda import CudaAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.boot import rehearsal
from services.worker.boot.common import RunnerParts, cache_dtype, make_cache, make_limits, make_recorder
from services.worker.boot.progress import BootProgress
from services.worker.described.choices import FlagChoice
from services.worker.described.layer import has_mlp_bias, undeclared
from services.worker.described.memory import graph_bytes, margin, page_bytes, table_bytes
from services.worker.described.ranks import ALONE
from services.worker.described.refusals import refuse_fp8_cache, refuse_unsupported_cuda_sizes
from services.worker.layers.block_fp8 import BlockFp8Linear
from services.worker.layers.expert_tiles import changes
from services.worker.layers.experts import has_groups
from services.worker.layers.grouped import GroupedLinear, GroupedWeights
from services.worker.layers.triton_block_fp8 import row_changes
from services.worker.layers.triton_grouped import row_changes as grouped_row_changes
from services.worker.models.base import RankModel
from services.worker.models.experts import Experts
from services.worker.models.skinny_cuda import SkinnyDecoder, supports
from services.worker.parallel.errors import ParallelError
from services.worker.parallel.exchange import Exchanges, make_exchanges
from services.worker.parallel.group import MOST_SENDS
from services.worker.runner.cuda.pieces import NoAttention
from services.worker.runner.cuda.runner import CudaRunner
from services.worker.runner.cuda.state import DeviceState
from services.worker.runner.peers import Peers
from services.worker.sampling.fused import FusedSampler

# Each micro-batch in flight has its own buffers for inputs and results.
_MAX_MICRO_BATCHES = 16

# Tokens of the pass that shows whether the host waits, and the message of torch if it does.
_FEW_TOKENS, _WAIT_MESSAGE = 8, "synchronizing CUDA operation"

# Steps whose activations a stage may have received and not started, since it receives plans ahead.
_RECEIVED_AHEAD = 4

log = structlog.get_logger(__name__)


def make_runner(parts: RunnerParts, progress: BootProgress | None = None) -> CudaRunner:
    """Return a runner with a cache of the configured size, by default the largest that fits, after the rehearsal.

    All ranks of the group must call this. They run the same steps. Raises ``InvalidRequest`` if the cache does
    not fit, with the size that does.
    """
    config, model, group, arena = parts.config, parts.model, parts.group, parts.arena
    progress = progress or BootProgress()
    device = model.device
    exchanges = _exchanges(parts)
    refuse_unsupported(config, model)
    if group is not None:
        group.wait_for_all()
    with progress.phase("compile" if config.torch_compile else "memory"):
        peak = _measure(parts, exchanges) + _bytes_in_transit(config, model)
    item = cache_dtype(config, model.dtype).itemsize
    bytes_per_page = page_bytes(model.local, config.page_size, item, routed=config.return_routed_experts)
    free, total = torch.cuda.mem_get_info(device)
    graphs = graph_bytes(config, model.local, model.dtype.itemsize)
    tables = table_bytes(config, model.config.max_context_tokens)
    room = free - peak - tables - graphs - margin(total)
    fitting = room // bytes_per_page if group is None else group.least(room // bytes_per_page)
    wanted = config.page_count
    log.info("memory", free_gib=_gib(free), step_gib=_gib(peak), pages_that_fit=fitting, pages_asked=wanted)
    if fitting < 1 or (wanted is not None and wanted > fitting):
        raise InvalidRequest(_advice(config, free, peak + tables, graphs, fitting), field="kv_cache_num_tokens")
    pages = fitting if wanted is None else wanted
    try:
        cache = make_cache(config, model, pages, arena)
        runner = assemble(parts, cache, exchanges)
        with progress.phase("rehearsal"):
            rehearse(runner, parts, exchanges, progress)
        return runner
    except Exception as error:
        runner = None  # otherwise the process could not exit: see ``release_frames``
        release_frames(error)
        if not is_out_of_memory(error):
            raise
        advice = _advice(config, free, peak + tables, graphs, fitting)
        raise InvalidRequest(advice, field="kv_cache_num_tokens") from error


def _exchanges(parts: RunnerParts) -> Exchanges:
    """Return the strategies of exchanging activations.

    Raises ``InvalidRequest`` if ``async_tp_threshold`` is set and products cannot overlap with the exchange.
    """
    config, model, group = parts.config, parts.model, parts.group
    if group is None:
        return make_exchanges(ALONE, 1)
    wanted = config.async_tp_threshold
    for refused, reason in (
        (not group.shares_memory, "the GPUs of these ranks cannot read each other's memory"),
        (model.quantizes, "products in fp8 do not overlap"),
        (
            any(layer.attention.output_bias or has_mlp_bias(layer) for layer in model.config.layers),
            "this model adds biases to its output projections",
        ),
    ):
        if wanted is not None and refused:
            raise InvalidRequest(
                f"flag async_tp_threshold={wanted}: {reason}; leave it out", field="async_tp_threshold"
            )
    row_bytes = model.config.hidden_size * model.dtype.itemsize
    return make_exchanges(group.ranks, row_bytes, shares_memory=group.shares_memory, fewest_overlapped=wanted)


def refuse_unsupported(config: ChosenWorkerConfig, model: RankModel) -> None:
    """Raise ``InvalidRequest`` if attention on CUDA does not support the model's layers, or sizes or dtypes."""
    layers = {layer.attention for layer in model.local.layers}
    if missing := sorted({name for layer in layers for name in undeclared(layer, cuda_attention.SUPPORTED)}):
        raise InvalidRequest(
            f"config.json: {', '.join(missing)} of the model's attention is not supported on cuda; choose another"
            " model, or device=cpu",
            field="model",
        )
    refuse_unsupported_cuda_sizes(config.page_size, model.config.stored_head_dim)
    if config.kv_cache_dtype == "fp8":
        refuse_fp8_cache(torch.cuda.get_device_name(model.device), torch.cuda.get_device_capability(model.device))


def disable_uncapturable_graphs(
    wanted: bool | str, chosen: ChosenWorkerConfig, choices: tuple[FlagChoice, ...], model: RankModel
) -> tuple[ChosenWorkerConfig, tuple[FlagChoice, ...]]:
    """Return ``chosen`` and ``choices`` with ``use_cudagraphs`` false if CUDA graphs cannot capture ``model``.

    ``wanted`` is the flag as the operator set it. Raises ``InvalidRequest`` if it is true.
    """
    if not (chosen.use_cudagraphs and model.may_wait and _waits(model)):
        return chosen, choices
    reason = f"the code of {model.config.foreign} makes the host wait for the device, which graphs cannot capture"
    if wanted is True:
        raise InvalidRequest(f"flag use_cudagraphs=T: {reason}; leave it out", field="use_cudagraphs")
    log.warning("no CUDA graphs", reason=reason)
    changed = (each._replace(value="F", reason=reason) if each.name == "use_cudagraphs" else each for each in choices)
    return chosen.model_copy(update={"use_cudagraphs": False}), tuple(changed)


def _waits(model: RankModel) -> bool:
    """Return whether a forward pass of ``model``, with its weights, makes the host wait for the device."""
    token_ids, positions = torch.zeros(2, _FEW_TOKENS, dtype=torch.int32, device=model.device)
    nothing = NoAttention(model.local.heads * model.local.head_dim)
    with torch.inference_mode():
        model.project(model(token_ids, positions, nothing))  # the first pass may move tensors to the device
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.project(model(token_ids, positions, nothing))
        except RuntimeError as error:
            if _WAIT_MESSAGE not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return False


def _measure(parts: RunnerParts, exchanges: Exchanges) -> int:
    """Return the bytes that the runner and its largest step use in addition to weights and cache.

    The steps that are run for this compile most kernels.
    """
    config, model = parts.config, parts.model
    pages = -(-min(config.max_tokens_per_forward, model.config.max_context_tokens) // config.page_size) + 1
    before = torch.cuda.memory_allocated()
    try:
        cache = make_cache(config, model, pages)
        cache_bytes = torch.cuda.memory_allocated() - before
        runner = assemble(parts, cache, exchanges)
        few = min(8, runner.limits.max_slots, runner.limits.max_tokens_per_step)
        _run_all(runner, rehearsal.decodes(runner.limits, few, rehearsal.PLAIN))
        torch.cuda.reset_peak_memory_stats()
        for plans in rehearsal.largest(runner.limits):
            _run_all(runner, plans)
        peak = torch.cuda.max_memory_allocated() - before - cache_bytes
    except (torch.OutOfMemoryError, ParallelError) as error:
        if not is_out_of_memory(error):
            raise
        raise InvalidRequest(
            f"flag max_tokens_per_forward={config.max_tokens_per_forward} with max_seqs_per_forward="
            f"{config.max_seqs_per_forward}: one step takes more memory than {torch.cuda.get_device_name()} has left"
            " beside the weights; lower either",
            field="max_tokens_per_forward",
        ) from error
    torch.cuda.synchronize(model.device)
    deactivate()
    del runner, cache
    gc.collect()  # the runner's ring and its places refer to each other
    torch.cuda.empty_cache()
    return peak


def release_frames(error: BaseException) -> None:
    """Delete the objects that the frames of ``error`` hold.

    Connections to other ranks can be closed only when the CUDA graphs that use them are deleted.
    """
    for each in _with_causes(error):
        traceback.clear_frames(each.__traceback__)
    deactivate()
    gc.collect()


def _bytes_in_transit(config: ChosenWorkerConfig, model: RankModel) -> int:
    """Return the largest number of bytes of activations that are sent and not received, or received and not used."""
    if model.ranks.pp_size == 1:
        return 0
    step_bytes = config.max_tokens_per_forward * model.config.hidden_size * model.dtype.itemsize
    return (MOST_SENDS + _RECEIVED_AHEAD) * step_bytes


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return ``error`` with its direct and indirect causes and contexts."""
    found = [error]
    for each in found:
        found += [other for other in (each.__cause__, each.__context__) if other is not None and other not in found]
    return found


def is_out_of_memory(error: Exception) -> bool:
    """Return whether ``error`` or one of its causes reports that the device has no memory left.

    Such errors can also come from libraries other than torch, or be the cause of a ``ParallelError``.
    """
    causes = _with_causes(error)
    return any(isinstance(each, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(each) for each in causes)


def assemble(parts: RunnerParts, cache: KvCache, exchanges: Exchanges) -> CudaRunner:
    """Return a runner over ``cache`` that has run no step yet."""
    config, model, group, grammars, mask_words, _ = parts
    micro_batches = _MAX_MICRO_BATCHES if model.ranks.pp_size > 1 else 1
    more: dict[str, Any] = {"max_micro_batches": micro_batches, "grammars": mask_words > 0}
    limits = make_limits(config, model, cache.page_count, hydragen=True, **more)
    attention = CudaAttention(
        cache,
        model.local.heads,
        model.rotaries,
        dtype=model.dtype,
        layers=model.attention_layers(),
        compiled=config.torch_compile,
        most_rows=min(limits.max_slots, limits.max_tokens_per_step),
    )
    device = cache.all_keys.device
    state, sampler = DeviceState.empty(limits, device), None
    if model.last:
        shared = cache.tokens, state.page_table
        masks: dict[str, Any] = {}
        if mask_words:
            masks = {"mask_shape": (limits.max_slots, mask_words), "total": exchanges.of(1).total}
        sampler = FusedSampler(model.project, model.config.vocab_size, device, *shared, **masks)
    peers = Peers(group, exchanges, model.config.hidden_size, model.dtype)
    recorder = make_recorder(model, cache, limits, peers.grain)
    return CudaRunner(model.forward, cache, attention, sampler, state, limits, peers, grammars, recorder)


def rehearse(runner: CudaRunner, parts: RunnerParts, exchanges: Exchanges, progress: BootProgress) -> None:
    """Run every kind of step and capture CUDA graphs, so that no request waits for a compilation or lacks memory."""
    limits, config, model, group = runner.limits, parts.config, parts.model, parts.group
    plans: Iterable[Plan]
    for plans in rehearsal.every_kind(limits):
        _run_all(runner, plans)
    changes = {*exchanges.begins, *_changes_of_experts(model), *_changes_of_products(model)}
    # The layers of another stage may have other kernels.
    for tokens in sorted(changes) if group is None else group.union(changes):
        for plans in rehearsal.around(limits, tokens, runner.grain):
            _run_all(runner, plans)
    if config.use_cudagraphs:
        skinny = SkinnyDecoder(model) if supports(model) else None
        torch.cuda.empty_cache()  # a capture cannot free cached memory that it needs
        before, began = torch.cuda.mem_get_info()[0], time.monotonic()
        with progress.phase("graphs"):
            # Of all stages, since they have to pad steps alike.
            features = {"has_experts": bool(model.config.experts), "has_windows": bool(model.config.windows)}
            runner.capture(config.cudagraph_max_size, skinny, config.piecewise_tokens, **features)
        used, seconds = before - torch.cuda.mem_get_info()[0], time.monotonic() - began
        log.info("graphs captured", gib=_gib(used), seconds=round(seconds, 1))
        for settings in (rehearsal.PLAIN, rehearsal.every_feature(limits)):
            _run_all(runner, rehearsal.decodes(limits, 1, settings))
    for plans in rehearsal.largest(limits):
        _run_all(runner, plans)


def _changes_of_experts(model: RankModel) -> set[int]:
    """Return the numbers of tokens from which on experts run other kernels."""
    modules = (module for module in model.modules() if isinstance(module, Experts))
    forms = {(module.gate_up.itemsize, has_groups(module.gate_up_scale)) for module in modules}
    forms = forms or {(model.dtype.itemsize, False)}  # transformers computes the model
    return {
        tokens
        for each in model.local.experts
        for item, groups in forms
        for tokens in changes(len(each.local), each.chosen, item, groups=groups)
    }


def _changes_of_products(model: RankModel) -> set[int]:
    """Return the numbers of tokens from which on products with quantized weights run other kernels."""
    modules = list(model.modules())
    widths = {len(module.weight) for module in modules if isinstance(module, BlockFp8Linear)}
    grouped = [GroupedWeights.of(module) for module in modules if isinstance(module, GroupedLinear)]
    in_blocks = {tokens for width in widths for tokens in row_changes(width)}
    return in_blocks | {tokens for each in grouped for tokens in grouped_row_changes(each)}


def _run_all(runner: CudaRunner, plans: Iterable[Plan]) -> None:
    runner.reset()
    for plan in plans:
        runner.run(plan)
    runner.reset()


def _advice(config: ChosenWorkerConfig, free: int, peak: int, graphs: int, fitting: int) -> str:
    """Return the message for a cache that does not fit. ``fitting`` is in pages, the other sizes are in bytes."""
    tokens = max(0, fitting) * config.page_size
    advice = (
        f"lower it to {tokens} or less, or let kv_cache_num_tokens=auto choose"
        if tokens
        else "lower max_tokens_per_forward or max_seqs_per_forward, or use a smaller model"
    )
    return (
        f"flag kv_cache_num_tokens={config.kv_cache_num_tokens}: {_gib(free)} GiB are free beside the weights; the"
        f" largest step (max_tokens_per_forward={config.max_tokens_per_forward}, max_seqs_per_forward="
        f"{config.max_seqs_per_forward}) takes {_gib(peak)} GiB and CUDA graphs {_gib(graphs)} GiB, which leaves room"
        f" for {tokens} tokens; {advice}"
    )


def _gib(size: int) -> float:
    return round(size / 2**30, 2)
