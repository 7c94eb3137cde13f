"""Choice of the values of flags that are ``auto``, from device, memory, model and processors.

Without torch, so that ``toka-doctor`` makes the same choices before a start. The ranks of a replica agree on the
smallest of their values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import as_text
from services.common.model.quantized.scheme import Scheme
from services.worker.described.checkpoint import active_parameters
from services.worker.described.config import ModelConfig
from services.worker.described.forms import kept_bits, layer_forms
from services.worker.described.memory import (
    BFLOAT16,
    FLOAT32,
    FP8,
    INTEGER_BITS,
    footprint,
    margin,
    page_bytes,
    weight_bytes,
)
from services.worker.described.ranks import Ranks
from services.worker.described.refusals import ROW_WISE_PRODUCTS, refuse_integer_weights
from services.worker.described.shares import local_config

# The flags that this module chooses.
NAMES = (
    "quantization",
    *("kv_cache_num_tokens", "max_seqs_per_forward", "max_tokens_per_forward"),
    *("torch_compile", "use_cudagraphs", "cudagraph_max_size", "piecewise_cudagraph_max_tokens"),
)
# Tokens of cache per slot. With fewer, sequences are limited by pages instead of slots.
_TOKENS_PER_SEQUENCE = 160
_MOST_SEQUENCES, _MOST_TOKENS, _FEWEST_TOKENS = 8192, 16384, 512
# Tokens times parameters of a step that takes about 0.2 s on an H200, and the multiprocessors of an H200.
_WORK_PER_STEP, H200_MULTIPROCESSORS = 7e13, 132
_OLDER_RATE = 0.5  # speed of a multiprocessor before compute capability 9.0, relative to 9.0
# Rows times parameters of a layer from which an H200 runs the layer longer than the host takes to launch it.
_WORK_PER_LAYER = 6.3e10
_MOST_GRAPH_ROWS, _FEWEST_GRAPH_ROWS = 1024, 32
_PIECEWISE_TOKENS = 2048
_LAUNCHED_SLOWLY = "larger steps take the device longer than the host to launch them"
# Share of the memory left after the weights that steps, page tables and CUDA graphs may use.
_SHARE_OF_STEPS = 0.25
_CPU_SEQUENCES, _CPU_TOKENS, _CPU_CACHE = 256, 2048, 128 * 1024
_SET = "set by you"


@dataclass(frozen=True)
class Device:
    """Properties of a device on which the choices depend. Sizes are in bytes."""

    kind: Literal["cpu", "cuda"]
    name: str
    free: int
    total: int
    processors: int  # multiprocessors of a GPU, or CPU cores that this process may use
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability


class FlagChoice(NamedTuple):
    """The value of one flag, formatted as on a command line, and the reason for it."""

    name: str
    value: str
    reason: str


def agree(
    chosen: ChosenWorkerConfig, choices: tuple[FlagChoice, ...], least: Callable[[int], int]
) -> tuple[ChosenWorkerConfig, tuple[FlagChoice, ...]]:
    """Return the results of ``choose`` with each size replaced by its minimum over the ranks.

    Pipeline stages differ in their layers and so in their choices, but all ranks run the same steps. ``least`` is a
    collective that returns the minimum of the values passed by all ranks.
    """
    sizes = {name: getattr(chosen, name) for name in NAMES if type(getattr(chosen, name)) is int}
    agreed = {name: least(size) for name, size in sizes.items()}
    reported = (each._replace(value=str(agreed[each.name])) if each.name in agreed else each for each in choices)
    return chosen.model_copy(update=agreed), tuple(reported)


def choose(
    config: WorkerConfig, device: Device, model: ModelConfig, ranks: Ranks, layers: range
) -> tuple[ChosenWorkerConfig, tuple[FlagChoice, ...]]:
    """Return ``config`` without ``auto``, and the value and reason of each flag in ``NAMES``.

    Values that the operator set are kept, and the others adapt to them. ``model`` describes the whole model, of which
    this rank has ``layers``.
    """
    chooser = _OnCuda if device.kind == "cuda" else _OnCpu
    return chooser(config, device, model, ranks, layers).choose()


class _Chooser(ABC):
    """Base of the choosers for CPUs and GPUs. It applies decisions to the flags that are ``auto``."""

    def __init__(self, config: WorkerConfig, device: Device, model: ModelConfig, ranks: Ranks, layers: range) -> None:
        self._config, self._device, self._model, self._ranks, self._layers = config, device, model, ranks, layers
        self._values: dict[str, Any] = {name: getattr(config, name) for name in NAMES}
        self._reasons = dict.fromkeys(NAMES, _SET)
        self._auto = frozenset(name for name in NAMES if self._values[name] == "auto")

    def choose(self) -> tuple[ChosenWorkerConfig, tuple[FlagChoice, ...]]:
        for name, value, reason in self._decisions():
            self._set(name, value, reason)
        chosen = self._chosen()
        return chosen, tuple(FlagChoice(name, as_text(self._values[name]), self._reasons[name]) for name in NAMES)

    @abstractmethod
    def _decisions(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the name, value and reason of each decision. It has no effect on flags that the operator set.

        Later decisions may read earlier ones from ``_values``.
        """

    def _set(self, name: str, value: Any, reason: str) -> None:
        if name in self._auto:
            self._values[name], self._reasons[name] = value, reason

    def _chosen(self) -> ChosenWorkerConfig:
        return ChosenWorkerConfig.model_construct(**{**dict(self._config), **self._values})

    def _item(self, automatic: int) -> int:
        """Return the size of a parameter in bytes. ``automatic`` is its size for ``dtype=auto``."""
        return {"auto": automatic, "float32": FLOAT32}.get(self._config.dtype, BFLOAT16)

    def _weights(self, automatic: int) -> int:
        """Return the size of this rank's weights in bytes."""
        item = self._item(automatic)
        return weight_bytes(
            self._model, self._ranks, self._layers, item, self._values["quantization"], self._device.kind
        )

    def _page(self, automatic: int) -> int:
        """Return the size of a page of this rank's cache in bytes."""
        local = local_config(self._model, self._ranks, self._layers)
        item = FP8 if self._config.kv_cache_dtype == "fp8" else self._item(automatic)
        return page_bytes(local, self._config.page_size, item, routed=self._config.return_routed_experts)


class _OnCuda(_Chooser):
    def _decisions(self) -> Iterator[tuple[str, Any, str]]:
        config, device, values = self._config, self._device, self._values
        yield "quantization", *choose_quantization(config, device, self._model, self._ranks)
        compiles = config.fail_on_recompile
        yield (
            "torch_compile",
            compiles,
            "fail_on_recompile=T asks for it"
            if compiles
            else "each operator is one kernel already: compiled steps are no faster, and starts are slower",
        )
        yield "use_cudagraphs", True, "small steps are one launch instead of hundreds"
        local = local_config(self._model, self._ranks, self._layers)
        in_layers = sum(active_parameters(local, layer) for layer in local.layers)
        graph_rows = _power_of_two(_WORK_PER_LAYER * len(local.layers) / in_layers)
        rows = max(_FEWEST_GRAPH_ROWS, min(graph_rows, _MOST_GRAPH_ROWS))
        yield "cudagraph_max_size", rows, _LAUNCHED_SLOWLY
        cached = self._cached_tokens()
        sequences = max(1, min(_power_of_two(cached / _TOKENS_PER_SEQUENCE), _MOST_SEQUENCES))
        if values["max_tokens_per_forward"] != "auto":
            sequences = min(sequences, values["max_tokens_per_forward"])
        yield (
            "max_seqs_per_forward",
            sequences,
            f"the cache holds about {cached:,} tokens, {max(1, cached // sequences):,} for each",
        )
        set_by_user = 0 if "max_seqs_per_forward" in self._auto else values["max_seqs_per_forward"]
        pieces = 0 if "piecewise_cudagraph_max_tokens" in self._auto else values["piecewise_cudagraph_max_tokens"]
        least = max(set_by_user, config.async_tp_threshold or 0, pieces)
        rate = device.processors / H200_MULTIPROCESSORS * (1.0 if device.capability >= (9, 0) else _OLDER_RATE)
        parameters = in_layers + local.vocab_size * local.hidden_size / self._ranks.tp_size
        tokens = max(2048, min(_power_of_two(_WORK_PER_STEP * rate / parameters), _MOST_TOKENS))
        tokens = max(least, tokens, values["max_seqs_per_forward"])
        yield "max_tokens_per_forward", tokens, "the largest step takes about 0.2 s or less"
        yield from self._smaller_steps(least)
        yield "piecewise_cudagraph_max_tokens", self._piecewise_tokens(), _LAUNCHED_SLOWLY
        used = f"; other programs use {_gib(device.total - device.free)} GiB" if self._is_shared else ""
        yield (
            "kv_cache_num_tokens",
            "auto",
            f"what weights and steps leave of the {_gib(device.free)} GiB that are free on {device.name}{used}",
        )

    def _smaller_steps(self, least: int) -> Iterator[tuple[str, Any, str]]:
        """Halve sizes that are ``auto`` until step, page tables and CUDA graphs leave enough memory for the cache."""
        fixed = self._least_bytes()
        budget = fixed + int(max(0, self._available_bytes() - fixed) * _SHARE_OF_STEPS)
        reason = f"more would leave the cache too little memory: steps and CUDA graphs may take {_gib(budget)} GiB"
        floors = {
            "cudagraph_max_size": _FEWEST_GRAPH_ROWS,
            "max_tokens_per_forward": min(_FEWEST_TOKENS, self._values["max_tokens_per_forward"]),
            "max_seqs_per_forward": 16,
        }
        for name, floor in floors.items():
            if name == "max_tokens_per_forward":
                floor = max(floor, least)
            while name in self._auto and self._values[name] // 2 >= floor and self._step_bytes() > budget:
                yield name, self._values[name] // 2, reason
        if self._values["max_seqs_per_forward"] > self._values["max_tokens_per_forward"]:
            yield "max_seqs_per_forward", self._values["max_tokens_per_forward"], reason

    def _piecewise_tokens(self) -> int:
        """Return the most tokens of a step that the host launches more slowly than the device computes it.

        With several ranks, collectives delay the host. A layer with experts has twice the launches of another.
        """
        most: int = self._values["max_tokens_per_forward"]
        if self._ranks.tp_size > 1:
            return most
        local = local_config(self._model, self._ranks, self._layers)
        slots = self._values["max_seqs_per_forward"] if local.experts else 0
        return min(most, max(slots, _PIECEWISE_TOKENS))

    def _step_bytes(self, **values: Any) -> int:
        """Return the bytes of the largest step, page tables and CUDA graphs. ``values`` override the chosen ones."""
        if "piecewise_cudagraph_max_tokens" in self._auto.difference(values):
            values["piecewise_cudagraph_max_tokens"] = self._piecewise_tokens()
        chosen = self._chosen().model_copy(update=values)
        rank = footprint(chosen, self._model, self._ranks, self._layers)
        return rank.step + rank.reserved

    def _least_bytes(self) -> int:
        """Return ``_step_bytes`` for the smallest sizes."""
        sizes = {"max_seqs_per_forward": 1, "max_tokens_per_forward": 1, "use_cudagraphs": False}
        return self._step_bytes(**sizes, cudagraph_max_size=_FEWEST_GRAPH_ROWS, piecewise_cudagraph_max_tokens=1)

    def _available_bytes(self) -> int:
        """Return the bytes that are left after weights and margin."""
        return max(0, self._device.free - self._weights(BFLOAT16) - margin(self._device.total))

    def _cached_tokens(self) -> int:
        """Return the number of tokens that the cache will hold, as an estimate."""
        if self._config.kv_cache_num_tokens != "auto":
            return self._config.kv_cache_num_tokens
        available = max(0, self._available_bytes() - self._least_bytes()) * (1 - _SHARE_OF_STEPS / 2)
        return int(available) // self._page(BFLOAT16) * self._config.page_size

    @property
    def _is_shared(self) -> bool:
        """True if other programs use a noticeable part of the device."""
        return self._device.total - self._device.free > margin(self._device.total)


class _OnCpu(_Chooser):
    def _decisions(self) -> Iterator[tuple[str, Any, str]]:
        config, device = self._config, self._device
        yield "quantization", *choose_quantization(config, device, self._model, self._ranks)
        yield (
            "torch_compile",
            config.fail_on_recompile,
            ("fail_on_recompile=T asks for it" if config.fail_on_recompile else "the kernels for CPUs start at once"),
        )
        yield "use_cudagraphs", False, "only GPUs have CUDA graphs"
        yield "cudagraph_max_size", _FEWEST_GRAPH_ROWS, "only GPUs have CUDA graphs"
        yield "piecewise_cudagraph_max_tokens", 0, "only GPUs have CUDA graphs"
        tokens = self._values["max_tokens_per_forward"]
        sequences = _CPU_SEQUENCES if tokens == "auto" else min(_CPU_SEQUENCES, tokens)
        yield "max_seqs_per_forward", sequences, f"enough to keep {device.processors} processors busy"
        yield (
            "max_tokens_per_forward",
            max(_CPU_TOKENS, self._values["max_seqs_per_forward"]),
            "prompts are computed in chunks, so that other requests are not delayed for long",
        )
        page, workers = self._page(FLOAT32), self._ranks.size * config.dp_size
        half = max(0, device.free - workers * self._weights(FLOAT32)) // 2 // workers
        pages = max(1, min(half // page, -(-_CPU_CACHE // config.page_size)))
        yield (
            "kv_cache_num_tokens",
            pages * config.page_size,
            f"{_gib(pages * page)} GiB, at most half of the {_gib(device.free)} GiB that are free",
        )


def choose_quantization(config: WorkerConfig, device: Device, model: ModelConfig, ranks: Ranks) -> tuple[str, str]:
    """Return the value of the flag ``quantization`` if it is ``auto``, and the reason. All ranks get the same."""
    forms = layer_forms(model, ranks, range(len(model.layers)))
    schemes = [scheme for each in forms for scheme in (*each.schemes, *each.converted)]
    if not schemes:
        return "none", "the layers of the checkpoint are not quantized"
    converted = f"the checkpoint's weights ({_joined(schemes)}) are converted to dtype"
    if device.kind == "cpu":
        integers = _choose_integers(config, model, ranks)
        return (integers, f"weights stay {_joined(schemes)}") if integers else ("none", f"{converted} on CPUs")
    kept = [each for each in forms if each.kept]
    if not kept:
        return "none", f"{converted}: {next(each.reason for each in forms if each.reason)}"
    in_fp8 = any(form.kind in ("fp8", "fp8_blocks") for each in kept for form in each.kept)
    if config.dtype == "float32" or (config.dtype == "float16" and in_fp8):
        return "none", f"{converted}: with dtype={config.dtype} there is no product for them"
    if in_fp8 and device.capability < ROW_WISE_PRODUCTS:
        return "none", f"{converted}: {device.name} has no products in fp8 with scales of rows"
    stay = f"weights stay {_joined(scheme for each in kept for scheme in each.schemes)}"
    others = [each for each in forms if each.reason or not each.kept]
    if not others:
        return "checkpoint", stay
    whole = all(not each.kept for each in others)
    reason = next((each.reason for each in others if each.reason), "the checkpoint does not quantize them")
    return "checkpoint", f"{stay}, except {'' if whole else 'some '}in {len(others)} of {len(forms)} layers: {reason}"


def _joined(schemes: Iterable[Scheme]) -> str:
    return " and ".join(dict.fromkeys(map(str, schemes)))


def _choose_integers(config: WorkerConfig, model: ModelConfig, ranks: Ranks) -> str | None:
    """Return the quantization with which CPUs keep the values of all matrices, ``int8`` or ``int4``, or None."""
    bits = kept_bits(model)
    if bits is None or config.dtype not in ("auto", "float32"):
        return None
    try:
        refuse_integer_weights(local_config(model, ranks, range(len(model.layers))), f"int{bits}", ranks.tp_size)
    except InvalidRequest:
        return None
    return f"int{bits}"


def explained_quantization(model: ModelConfig, choices: Iterable[FlagChoice]) -> FlagChoice | None:
    """Return the choice of ``quantization`` with its reason, or None if the checkpoint is not quantized."""
    return None if model.quantization is None else next(each for each in choices if each.name == "quantization")


def settings_of(model: ModelConfig, choices: Iterable[FlagChoice]) -> dict[str, str]:
    """Return the values of ``choices`` by flag for the log, with ``explained_quantization`` if there is one."""
    choices = tuple(choices)
    explained = explained_quantization(model, choices)
    reason = {} if explained is None else {"quantization_reason": explained.reason}
    return {each.name: each.value for each in choices} | reason


def refuse_impossible_quantization(config: WorkerConfig, device: Device, model: ModelConfig, ranks: Ranks) -> None:
    """Raise ``InvalidRequest`` if the flag ``quantization`` is ``checkpoint`` and no weights can stay quantized."""
    if config.quantization != "checkpoint":
        return
    value, reason = choose_quantization(config, device, model, ranks)
    others = "auto or none"
    if value in INTEGER_BITS:
        reason, others = f"CPUs keep these weights with quantization={value}", f"auto, {value} or none"
    if value != "checkpoint":
        raise InvalidRequest(f"flag quantization=checkpoint: {reason}; use quantization={others}", field="quantization")


def _power_of_two(value: float) -> int:
    """Return the largest power of two that is at most ``value``, or 1."""
    return 1 << max(0, int(value).bit_length() - 1)


def _gib(size: int) -> float:
    return round(size / 2**30, 1)
