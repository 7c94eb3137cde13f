"""The rendezvous of a replica's workers, which compares their flags."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports them

from services.common.addresses import is_loopback
from services.common.errors import InvalidRequest
from services.worker.described.ranks import Ranks
from services.worker.parallel.errors import ParallelError

# Settings that are not flags. The first is true if FlashInfer has kernels for the model, the second is the fingerprint
# of the model's files.
INSTALLED, FILES = "flashinfer", "model_files"
_PROBE_S = 0.1
# Time for which a rank may be taken. After a loss, the workers of the earlier replica exit one after the other.
_TAKEN_S = 30.0


def meet(ranks: Ranks, address: str, port: int, settings: Mapping[str, object], timeout_s: float) -> Store:
    """Wait for all workers of the replica, and return the store that they share. The first rank hosts it.

    ``settings`` (flag -> value as in JSON) must be equal on all ranks. Raises ``InvalidRequest`` naming the flag that
    differs, and ``ParallelError`` if a worker does not connect within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    if is_loopback(address):
        _stay_on_loopback()
    try:
        store = keep_store(address, port, timeout_s) if ranks.index == 0 else _join(ranks, address, port, deadline)
        if ranks.index == 0:
            store.set("settings", json.dumps(dict(settings)))
        try:
            _compare(settings, json.loads(store.get("settings")))
        except InvalidRequest as error:
            store.set("refused", f"{ranks.name()}: {error}")
            raise
        store.set(f"here/{ranks.index}", "")
        _wait_for_all(store, ranks, address, port, deadline)
    except dist.DistError as error:
        raise ParallelError(f"the replica's workers cannot meet at {address}:{port} ({error})") from error
    return store


def keep_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """Host the store at ``port``, and return it. It listens on loopback only if ``address`` is a loopback address."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((socket.gethostbyname(address) if is_loopback(address) else "", port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise InvalidRequest(
            f"flag master_port={port}: cannot listen there ({error.strerror}); choose another for this replica",
            field="master_port",
        ) from error
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _join(ranks: Ranks, address: str, port: int, deadline: float) -> TCPStore:
    """Connect to the store of the first rank, and take this rank in it.

    The rank may be taken in the store of an earlier replica, which has lost a worker and will exit. So try again.
    """
    taken_deadline = min(deadline, time.monotonic() + _TAKEN_S)
    while True:
        _wait_for_listener(ranks, address, port, deadline)
        with contextlib.suppress(dist.DistError):  # the store has closed since
            timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
            if store.add(f"taken/{ranks.index}", 1) == 1:
                return store
        if time.monotonic() > taken_deadline:
            raise InvalidRequest(
                f"flags tp_rank={ranks.tp_rank} pp_rank={ranks.pp_rank}: another worker at {address}:{port} is this"
                " rank already; give each its own, and each replica its own master_port",
                field="tp_rank",
            )
        time.sleep(_PROBE_S)


def _wait_for_listener(ranks: Ranks, address: str, port: int, deadline: float) -> None:
    """Wait until a process listens at ``address:port``. The store's own client would log a page for each attempt."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PROBE_S * 10):
            return
        if time.monotonic() > deadline:
            raise ParallelError(
                f"no worker listens at master_addr={address} master_port={port}: start {ranks.name(0)} there, or"
                " correct the flags"
            )
        time.sleep(_PROBE_S)


def _compare(own: Mapping[str, object], first: Mapping[str, object]) -> None:
    """Raise ``InvalidRequest`` if a setting of this rank differs from that of the first rank."""
    for name, value in own.items():
        if first.get(name) != value:
            if name == FILES:
                raise InvalidRequest(
                    f"flag model={own['model']}: its files here are not those of the first worker of this replica"
                    f" (fingerprint {value} instead of {first.get(name)}): config.json or the weights differ; give all"
                    " hosts the same revision of the model",
                    field="model",
                )
            setting, advice = f"flag {name}", "start all with the same flags but for their ranks"
            if name == INSTALLED:
                setting, advice = name, "install the same packages for all"
            raise InvalidRequest(
                f"{setting}={_written(value)}: the first worker of this replica has {name}="
                f"{_written(first.get(name))}; {advice}",
                field=name,
            )


def _wait_for_all(store: Store, ranks: Ranks, address: str, port: int, deadline: float) -> None:
    while missing := [index for index in range(ranks.size) if not store.check([f"here/{index}"])]:
        if store.check(["refused"]):
            raise ParallelError(f"the replica cannot start; {store.get('refused').decode()}")
        if time.monotonic() > deadline:
            raise ParallelError(
                f"{', '.join(map(ranks.name, missing))} did not connect to {address}:{port}: start every rank of the"
                " replica, with the same tp_size and pp_size"
            )
        time.sleep(_PROBE_S)


def _written(value: object) -> str:
    """Return ``value`` as it is written on a command line."""
    if isinstance(value, bool):
        return "T" if value else "F"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _stay_on_loopback() -> None:
    """Make Gloo use the loopback interface. Otherwise it uses the address to which the host's name resolves."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
