"""Calls that block until a trainer takes part. They end as soon as their caller disconnects."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import grpc
import torch

from services.common.boundaries import errors_to
from services.common.errors import Cancelled
from services.worker.parallel.update_group import GroupAddress
from tokasaurus.common.v1 import weights_pb2

_TIMEOUT_S = 300.0

R = TypeVar("R")


def read_address(group: weights_pb2.UpdateGroup, index: int, device: torch.device) -> GroupAddress:
    """Return the address of a group for the worker number ``index`` of the replica. ``device``: that of the model."""
    return GroupAddress(
        group.name,
        group.backend or ("nccl" if device.type == "cuda" else "gloo"),
        group.master_address,
        group.master_port,
        group.first_rank + index if group.first_rank else 0,
        group.world_size,
        group.timeout_ns * 1e-9 if group.HasField("timeout_ns") else _TIMEOUT_S,
    )


def run_while_connected(
    context: grpc.ServicerContext, work: Callable[[], R], abandon: Callable[[R | None], object]
) -> R:
    """Run ``work`` in a thread of its own, because torch may block it. Return its result.

    If the caller disconnects, ``abandon`` is called at once with None, and later with the result, if there is one. Then
    ``Cancelled`` is raised.
    """
    done: Future[R] = Future()
    ended = threading.Event()  # the work or the call has ended

    def run() -> None:
        with errors_to(done.set_exception, BaseException):
            done.set_result(work())
        ended.set()

    if not context.add_callback(ended.set):
        raise Cancelled("the caller has disconnected")
    threading.Thread(target=run, name="update-group", daemon=True).start()
    ended.wait()
    if not context.is_active():
        abandon(None)
        done.add_done_callback(lambda future: None if future.exception() else abandon(future.result()))
        raise Cancelled("the caller has disconnected")
    return done.result()
