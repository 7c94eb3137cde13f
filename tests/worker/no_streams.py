"""A device without streams and graphs, for the GPU's runner where kernels are interpreted."""

import pytest
import torch

from tests.worker.interpreter import INTERPRETED


@pytest.fixture
def device_without_streams(monkeypatch):
    """What the runner uses of ``torch.cuda``, for a CPU."""
    if INTERPRETED:
        do_without_streams(monkeypatch)


def do_without_streams(monkeypatch) -> None:
    """``device_without_streams``, in any process that interprets kernels."""
    from services.worker.boot.precompile.dry_device import without_streams
    from services.worker.runner.cuda import graphs, pieces

    for owner, name, value in without_streams():
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(graphs, "capture", launch_again)
    monkeypatch.setattr(pieces, "capture_whole", launch_again)
    monkeypatch.setattr(pieces, "capture_between", launch_again_around)


def launch_again(launches, *_):
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
    from services.worker.runner.cuda.pieces import NoAttention

    first = launches(NoAttention(width))

    def replay(attention) -> None:
        first.copy_(launches(attention))

    return replay, first
