"""Graphs in pieces, without a device: what is captured where, and what is left when a capture fails."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.worker.attention.base import HeadNorms
from services.worker.attention.spans import Spans
from tests.worker.interpreter import needs_triton

pytestmark = needs_triton

WIDTH = 8
NORMS = HeadNorms(torch.ones(4), torch.ones(4), 1e-6)


@pytest.fixture
def device(monkeypatch):
    """``device.log``: what was captured and launched; ``device.graphs``: weak references; ``device.fails_at``: the
    capture, counted from 0, that cannot be ended."""
    from services.worker.runner.cuda import pieces

    seen = SimpleNamespace(log=[], graphs=[], fails_at=None)

    class Graph:
        def __init__(self) -> None:
            self.number = len(seen.graphs)
            self.open = False
            seen.graphs.append(weakref.ref(self))

        def capture_begin(self, **_) -> None:
            self.open = True

        def capture_end(self) -> None:
            if not self.open:
                raise RuntimeError("not capturing")
            self.open = False
            if self.number == seen.fails_at:
                raise RuntimeError("CUDA error: out of memory")

        def replay(self) -> None:
            seen.log.append(f"graph {self.number}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch, "as_tensor", lambda value, device: torch.zeros(value.nbytes, dtype=torch.uint8))
    monkeypatch.setattr(pieces, "_Bytes", lambda tensor: tensor)
    return seen


class NoStream:
    def __enter__(self) -> None: ...

    def __exit__(self, *_) -> None: ...


def capture(layers: int, broken: int | None = None):
    """Capture a model of ``layers`` attentions. The input of the attention ``broken`` is not contiguous."""
    from services.worker.runner.cuda.pieces import capture_between

    def launches(step) -> torch.Tensor:
        x = torch.zeros(4, 3 * WIDTH)
        for layer in range(layers):
            given = torch.zeros(3 * WIDTH, 4).T if layer == broken else x
            found = step.run_qkv(layer, given, NORMS)
            x = found.repeat(1, 3)
        return found

    return capture_between(launches, WIDTH, None, NoStream())


def test_attentions_are_launched_between_the_graphs(device):
    replay, outcome = capture(3)
    assert outcome.shape == (4, WIDTH)
    calls = []

    def run_into(layer, qkv, norms, output) -> None:
        device.log.append(f"attention {layer}")
        calls.append((qkv.shape, output.shape, norms))

    for _ in range(2):
        device.log.clear()
        replay(SimpleNamespace(run_into=run_into))
        expected = ["graph 0", "attention 0", "graph 1", "attention 1", "graph 2", "attention 2", "graph 3"]
        assert device.log == expected
    assert set(calls) == {((4, 3 * WIDTH), (4, WIDTH), NORMS)}


@pytest.mark.parametrize(
    ("fails_at", "broken", "message", "of_memory"),
    [
        (2, None, "CUDA error: out of memory", True),
        pytest.param(None, 1, "must be contiguous", False, marks=pytest.mark.slow),
    ],
)
def test_a_capture_that_fails_says_why_and_leaves_no_graph(device, fails_at, broken, message, of_memory):
    """Connections to other ranks would wait for graphs that never end."""
    from services.worker.boot.cuda import is_out_of_memory, release_frames

    device.fails_at = fails_at
    with pytest.raises((RuntimeError, ValueError), match=message) as failed:
        capture(4, broken)
    assert is_out_of_memory(failed.value) == of_memory
    release_frames(failed.value)
    gc.collect()
    assert len(device.graphs) >= 2
    assert [graph() for graph in device.graphs if graph() is not None] == []


def test_what_an_error_came_of_is_let_go_too():
    from services.worker.boot.cuda import is_out_of_memory, release_frames

    class Held: ...

    made = []

    def first() -> None:
        held = Held()
        made.append(weakref.ref(held))
        raise torch.OutOfMemoryError("no memory")

    def second() -> None:
        try:
            first()
        finally:
            raise RuntimeError("and then this")

    with pytest.raises(RuntimeError, match="and then this") as failed:
        second()
    assert is_out_of_memory(failed.value)
    release_frames(failed.value)
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(1, 16), (17, 32), (65, 128), (257, 288), (2048, 2048), (2049, None), (2300, 2304), (8192, 8192), (8193, None)],
)
def test_many_tokens_are_padded_by_little_or_launched_one_by_one(tokens, size):
    from services.worker.described.memory import piece_sizes
    from services.worker.runner.cuda.pieces import StepPieces

    found = StepPieces.__new__(StepPieces)
    found._sizes, found._host_bound = piece_sizes(8192), 2048
    assert found.find(tokens) == size


def test_groups_leave_a_graph_that_cannot_have_them_where_they_save_much(monkeypatch):
    """8 KV heads of 128 in bfloat16: 4 KiB of a token."""
    from services.worker.attention.cuda import CudaAttention
    from services.worker.runner.cuda.graphs import DecodeGraphs, FoundGraph, Kind

    attention = CudaAttention.__new__(CudaAttention)
    attention.kv_heads, attention.head_dim = 8, 128
    attention.cache = SimpleNamespace(keys=[torch.zeros(1, dtype=torch.bfloat16)])
    monkeypatch.setattr(CudaAttention, "captures_groups", False)
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs._sizes, graphs._attention, graphs._stages = [1024], attention, [2048]
    graphs._plain, graphs._graphs = {1024: [(2048, "whole")]}, {Kind(1024, 2048, False): "whole"}
    graphs._keeps_size = False

    def found(rows: int, pieces: bool = True):
        return graphs.find(rows, 900, Spans(*(np.array([value], np.int32) for value in (0, rows, 0, 704))), pieces)

    assert attention.bytes_saved(Spans(*(np.array([value], np.int32) for value in (0, 3, 0, 10)))) == 2 * 10 * 4096
    whole = FoundGraph("whole", None)
    assert found(500) == whole
    assert found(1000) is None
    assert found(1000, pieces=False) == whole
    assert graphs.find(1000, 900, None, True) == whole
    graphs._keeps_size = True
    assert found(1000) == whole
