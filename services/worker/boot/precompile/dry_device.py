"""A device that computes nothing: replacements for the GPU functions that the CUDA runner calls.

Its tensors are those of torch's ``meta`` device.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.attention import cuda as attention
from services.worker.attention import flashinfer_spans
from services.worker.boot.precompile.job import GpuTarget
from services.worker.layers import (
    cuda_devices,
    triton_block_fp8,
    triton_experts,
    triton_grouped,
    triton_overlap,
    triton_routing,
    triton_rows,
)
from services.worker.runner.cuda import graphs, pieces

# Each operator is a function of its name.
_OPERATORS = (triton_rows, triton_routing, triton_experts, triton_block_fp8, triton_grouped)


class Replacement(NamedTuple):
    """A new value for an attribute."""

    owner: Any
    name: str
    value: object


class DryEvent:
    """A CUDA event that is always complete."""

    def __init__(self, **_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: "DryEvent") -> float:
        return 0.0


def without_streams() -> list[Replacement]:
    """Return replacements with which streams and events of ``torch.cuda`` do nothing, on any device."""
    stream = SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda stream: None)
    return [
        Replacement(torch.cuda, "Event", DryEvent),
        Replacement(torch.cuda, "Stream", lambda **_: stream),
        Replacement(torch.cuda, "current_stream", lambda: stream),
        Replacement(torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        Replacement(torch.cuda, "synchronize", lambda *_: None),
        Replacement(torch.cuda, "graph_pool_handle", lambda: None),
        Replacement(torch.Tensor, "record_stream", lambda *_: None),
    ]


def dry(gpu: GpuTarget) -> list[Replacement]:
    """Return replacements with which ``torch.cuda`` reports ``gpu``.

    A capture launches its kernels once, and its replay does nothing.
    """
    return [
        *without_streams(),
        Replacement(torch.cuda, "mem_get_info", lambda *_: (gpu.memory, gpu.memory)),
        Replacement(torch.cuda, "empty_cache", lambda: None),
        Replacement(torch.cuda, "get_device_name", lambda *_: gpu.name),
        Replacement(torch.cuda, "get_device_capability", lambda *_: gpu.capability),
        *(Replacement(module, "capability", lambda _: gpu.capability) for module in (cuda_devices, triton_overlap)),
        Replacement(graphs, "capture", _capture),
        Replacement(pieces, "capture_whole", _capture),
        Replacement(pieces, "capture_between", _capture_between),
        Replacement(flashinfer_spans, "available", lambda *_: gpu.flashinfer),
        Replacement(flashinfer_spans, "make_workspace", lambda _: None),
        Replacement(attention, "FlashInferSpans", _NoSpans),
    ]


def _capture(launches: Callable[[], Any], *_: object) -> tuple[Callable[[], None], Any]:
    return lambda: None, launches()


def _capture_between(
    launches: pieces.Launches, width: int, _pool: object, _stream: object
) -> tuple[pieces.Replay, torch.Tensor]:
    return lambda _: None, launches(pieces.NoAttention(width))


class _NoSpans:
    """An attention backend whose kernels need no compilation."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def plan(self, *_: object) -> "_NoSpans":
        return self

    def run(self, *_: object) -> None: ...


class DryTensors(TorchDispatchMode):
    """A dispatch mode in which our own operators launch kernels.

    Tensors of the host and of ``meta`` can be copied to each other.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "tokasaurus":
            name = func._schema.name.partition("::")[2]
            for module in _OPERATORS:
                if hasattr(module, name):
                    return getattr(module, name)(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and not args[0].is_meta and args[1].is_meta:
            return args[0]
        return func(*args, **kwargs)
