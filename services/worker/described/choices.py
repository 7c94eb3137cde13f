"""The values of flags that are ``auto``, chosen from device, memory, model and processors.

No torch here: ``toka-doctor`` chooses before a start as the worker does at its start.

The ranks of a replica agree on the least of what they choose.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.flags import as_text
from services.worker.described.checkpoint import layer_shapes
from services.worker.described.config import ModelConfig
from services.worker.described.memory import BFLOAT16, FLOAT32, FP8, footprint, margin, page_bytes, weight_bytes
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config

# The flags that this module chooses.
NAMES = (
    *("kv_cache_num_tokens", "max_seqs_per_forward", "max_tokens_per_forward"),
    *("torch_compile", "use_cudagraphs", "cudagraph_max_size"),
)
# Tokens of cache for each sequence that may run. With fewer, sequences wait for pages and not for slots.
_TOKENS_PER_SEQUENCE = 160
_MOST_SEQUENCES, _MOST_TOKENS, _FEWEST_TOKENS = 8192, 16384, 512
# A step of this many tokens times parameters takes about 0.2 s on an H200, which has this many multiprocessors.
_WORK_PER_STEP, H200_MULTIPROCESSORS = 7e13, 132
_OLDER_RATE = 0.5  # of a multiprocessor before compute capability 9.0, beside one of 9.0
# With more rows times parameters of a layer, an H200 takes longer for a layer than the host takes to launch it.
_WORK_PER_LAYER = 6.3e10
_MOST_GRAPH_ROWS, _FEWEST_GRAPH_ROWS = 1024, 32
# The share of the memory beside the weights that steps, page tables and CUDA graphs may take.
_SHARE_OF_STEPS = 0.25
_CPU_SEQUENCES, _CPU_TOKENS, _CPU_CACHE = 256, 2048, 128 * 1024
_SET = "set by you"


@dataclass(frozen=True)
class Device:
    """The facts about one device on which choices depend. Sizes are in bytes."""

    kind: Literal["cpu", "cuda"]
    name: str
    free: int
    total: int
    processors: int  # multiprocessors of a GPU; cores that this process may use on a CPU
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability


class Choice(NamedTuple):
    """The value of one flag, as on a command line, and why it was chosen."""

    name: str
    value: str
    reason: str


def agree(
    chosen: ChosenWorkerConfig, choices: tuple[Choice, ...], least: Callable[[int], int]
) -> tuple[ChosenWorkerConfig, tuple[Choice, ...]]:
    """Return what ``choose`` returned, with the least of all ranks' sizes: pipeline stages differ in their layers, and
    all ranks run the same steps. ``least`` returns the least of the values that the ranks call it with."""
    sizes = {name: getattr(chosen, name) for name in NAMES if type(getattr(chosen, name)) is int}
    agreed = {name: least(size) for name, size in sizes.items()}
    told = (each._replace(value=str(agreed[each.name])) if each.name in agreed else each for each in choices)
    return chosen.model_copy(update=agreed), tuple(told)


def choose(
    config: WorkerConfig, device: Device, model: ModelConfig, ranks: Ranks, layers: range, max_context: int
) -> tuple[ChosenWorkerConfig, tuple[Choice, ...]]:
    """Return ``config`` without ``auto`` and, for each flag of ``NAMES``, the value and the reason.

    A value that is set is kept, and the others adapt to it. ``model`` describes the whole model, of which this rank has
    ``layers``.
    """
    chooser = _OnCuda if device.kind == "cuda" else _OnCpu
    return chooser(config, device, model, ranks, layers, max_context).choose()


class _Chooser(ABC):
    """The part that CPUs and GPUs share."""

    def __init__(
        self,
        config: WorkerConfig,
        device: Device,
        model: ModelConfig,
        ranks: Ranks,
        layers: range,
        max_context: int,
    ) -> None:
        self._config, self._device, self._model = config, device, model
        self._ranks, self._layers, self._max_context = ranks, layers, max_context
        self._values: dict[str, Any] = {name: getattr(config, name) for name in NAMES}
        self._reasons = dict.fromkeys(NAMES, _SET)
        self._auto = frozenset(name for name in NAMES if self._values[name] == "auto")

    def choose(self) -> tuple[ChosenWorkerConfig, tuple[Choice, ...]]:
        for name, value, reason in self._decisions():
            self._set(name, value, reason)
        chosen = self._chosen()
        return chosen, tuple(Choice(name, as_text(self._values[name]), self._reasons[name]) for name in NAMES)

    @abstractmethod
    def _decisions(self) -> Iterator[tuple[str, Any, str]]:
        """Yield each flag with the value and the reason to use if it is ``auto``. A later decision may build on
        ``_values`` of earlier ones."""

    def _set(self, name: str, value: Any, reason: str) -> None:
        if name in self._auto:
            self._values[name], self._reasons[name] = value, reason

    def _chosen(self) -> ChosenWorkerConfig:
        return ChosenWorkerConfig.model_construct(**{**dict(self._config), **self._values})

    def _item(self, automatic: int) -> int:
        """Return the bytes of a parameter, where ``automatic`` is what ``dtype=auto`` means."""
        return {"auto": automatic, "float32": FLOAT32}.get(self._config.dtype, BFLOAT16)

    def _weights(self, automatic: int) -> int:
        """Return the bytes of this rank's weights."""
        item = self._item(automatic)
        return weight_bytes(self._model, self._ranks, self._layers, item, self._config.quantization)

    def _page(self, automatic: int) -> int:
        """Return the bytes of a page of this rank's cache."""
        local = local_config(self._model, self._ranks, len(self._layers))
        item = FP8 if self._config.kv_cache_dtype == "fp8" else self._item(automatic)
        return page_bytes(local, self._config.page_size, item)


class _OnCuda(_Chooser):
    def _decisions(self) -> Iterator[tuple[str, Any, str]]:
        config, device, values = self._config, self._device, self._values
        compiles = config.fail_on_recompile
        yield (
            "torch_compile",
            compiles,
            "fail_on_recompile=T asks for it"
            if compiles
            else "each operator is one kernel already: compiled steps are no faster, and starts are slower",
        )
        yield "use_cudagraphs", True, "small steps are one launch instead of hundreds"
        local = local_config(self._model, self._ranks, len(self._layers))
        per_layer = sum(math.prod(shape) for shape in layer_shapes(local).values())
        rows = max(_FEWEST_GRAPH_ROWS, min(_power_of_two(_WORK_PER_LAYER / per_layer), _MOST_GRAPH_ROWS))
        yield "cudagraph_max_size", rows, "larger steps take the device longer than the host to launch them"
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
        least = max(set_by_user, config.async_tp_threshold or 0, config.piecewise_cudagraph_max_tokens or 0)
        rate = device.processors / H200_MULTIPROCESSORS * (1.0 if device.capability >= (9, 0) else _OLDER_RATE)
        parameters = per_layer * len(self._layers) + local.vocab_size * local.hidden_size / self._ranks.tp_size
        tokens = max(2048, min(_power_of_two(_WORK_PER_STEP * rate / parameters), _MOST_TOKENS))
        tokens = max(least, tokens, values["max_seqs_per_forward"])
        yield "max_tokens_per_forward", tokens, "the largest step takes about 0.2 s or less"
        yield from self._smaller_steps(least)
        used = f"; other programs use {_gib(device.total - device.free)} GiB" if self._is_shared else ""
        yield (
            "kv_cache_num_tokens",
            "auto",
            f"what weights and steps leave of the {_gib(device.free)} GiB that are free on {device.name}{used}",
        )

    def _smaller_steps(self, least: int) -> Iterator[tuple[str, Any, str]]:
        """Halve what is ``auto`` until the largest step, page tables and CUDA graphs leave the cache enough memory."""
        fixed = self._least_taken()
        budget = fixed + int(max(0, self._room() - fixed) * _SHARE_OF_STEPS)
        reason = f"more would leave the cache too little memory: steps and CUDA graphs may take {_gib(budget)} GiB"
        floors = {
            "cudagraph_max_size": _FEWEST_GRAPH_ROWS,
            "max_tokens_per_forward": min(_FEWEST_TOKENS, self._values["max_tokens_per_forward"]),
            "max_seqs_per_forward": 16,
        }
        for name, floor in floors.items():
            if name == "max_tokens_per_forward":
                floor = max(floor, least)
            while name in self._auto and self._values[name] // 2 >= floor and self._taken() > budget:
                yield name, self._values[name] // 2, reason
        if self._values["max_seqs_per_forward"] > self._values["max_tokens_per_forward"]:
            yield "max_seqs_per_forward", self._values["max_tokens_per_forward"], reason

    def _taken(self, **values: Any) -> int:
        """Return the bytes of the largest step, page tables and CUDA graphs, with ``values`` instead of the chosen."""
        chosen = self._chosen().model_copy(update=values)
        found = footprint(chosen, self._model, self._ranks, self._layers, self._max_context)
        return found.step + found.reserved

    def _least_taken(self) -> int:
        """Return the bytes that the smallest sizes take."""
        sizes = {"max_seqs_per_forward": 1, "max_tokens_per_forward": 1, "use_cudagraphs": False}
        return self._taken(**sizes, cudagraph_max_size=_FEWEST_GRAPH_ROWS, piecewise_cudagraph_max_tokens=None)

    def _room(self) -> int:
        """Return the bytes that are left beside the weights."""
        return max(0, self._device.free - self._weights(BFLOAT16) - margin(self._device.total))

    def _cached_tokens(self) -> int:
        """Return about how many tokens the cache will hold."""
        if self._config.kv_cache_num_tokens != "auto":
            return self._config.kv_cache_num_tokens
        room = max(0, self._room() - self._least_taken()) * (1 - _SHARE_OF_STEPS / 2)
        return int(room) // self._page(BFLOAT16) * self._config.page_size

    @property
    def _is_shared(self) -> bool:
        """True if other programs use a noticeable part of the device."""
        return self._device.total - self._device.free > margin(self._device.total)


class _OnCpu(_Chooser):
    def _decisions(self) -> Iterator[tuple[str, Any, str]]:
        config, device = self._config, self._device
        yield (
            "torch_compile",
            config.fail_on_recompile,
            ("fail_on_recompile=T asks for it" if config.fail_on_recompile else "the kernels for CPUs start at once"),
        )
        yield "use_cudagraphs", False, "only GPUs have CUDA graphs"
        yield "cudagraph_max_size", _FEWEST_GRAPH_ROWS, "only GPUs have CUDA graphs"
        tokens = self._values["max_tokens_per_forward"]
        sequences = _CPU_SEQUENCES if tokens == "auto" else min(_CPU_SEQUENCES, tokens)
        yield "max_seqs_per_forward", sequences, f"enough to keep {device.processors} processors busy"
        yield (
            "max_tokens_per_forward",
            max(_CPU_TOKENS, self._values["max_seqs_per_forward"]),
            "prompts are computed in chunks that others need not wait long for",
        )
        page, workers = self._page(FLOAT32), self._ranks.size * config.dp_size
        half = max(0, device.free - workers * self._weights(FLOAT32)) // 2 // workers
        pages = max(1, min(half // page, -(-_CPU_CACHE // config.page_size)))
        yield (
            "kv_cache_num_tokens",
            pages * config.page_size,
            f"{_gib(pages * page)} GiB, at most half of the {_gib(device.free)} GiB that are free",
        )


def _power_of_two(value: float) -> int:
    """Return the largest power of two that is at most ``value``, or 1."""
    return 1 << max(0, int(value).bit_length() - 1)


def _gib(size: int) -> float:
    return round(size / 2**30, 1)
