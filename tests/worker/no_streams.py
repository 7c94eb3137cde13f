"""A device without streams and graphs, for the GPU's runner where kernels are interpreted."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.worker.interpreter import INTERPRETED


class NoEvent:
    """An event of a device that has always done everything."""

    def __init__(self, **_) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: "NoEvent") -> float:
        return 0.0


@pytest.fixture
def device_without_streams(monkeypatch):
    """What the runner uses of ``torch.cuda``, for a CPU."""
    if INTERPRETED:
        do_without_streams(monkeypatch)


def do_without_streams(monkeypatch) -> None:
    """``device_without_streams``, in any process that interprets kernels."""
    from services.worker.runner.cuda import graphs, pieces

    stream = SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(graphs, "capture", launch_again)
    monkeypatch.setattr(pieces, "capture_between", launch_again_around)


def launch_again(launches, _):
    """As ``graphs.capture``: a graph that calls ``launches`` and writes over the first outcome."""
    first = launches()

    def replay() -> None:
        again = launches()
        for old, new in zip(*((value,) if torch.is_tensor(value) else value for value in (first, again)), strict=True):
            if old is not None:
                old.copy_(new)

    return replay, first


def launch_again_around(launches, width, pool, stream):
    """As ``pieces.capture_between``, in that way. Attends to nothing meanwhile, as a capture does."""
    from services.worker.runner.cuda.pieces import _Nothing

    first = launches(_Nothing(width))

    def replay(attention) -> None:
        first.copy_(launches(attention))

    return replay, first
