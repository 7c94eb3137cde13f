"""Where a replica's workers meet, and whether they were started alike."""

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

# Among the settings, what is no flag: whether there are FlashInfer's kernels for the model.
INSTALLED = "flashinfer"
_PROBE_S = 0.1
# For how long a rank may be taken: workers end one after the other when one is lost.
_TAKEN_S = 30.0


def meet(ranks: Ranks, address: str, port: int, settings: Mapping[str, object], timeout_s: float) -> Store:
    """A store that all workers of the replica have in common, once all have come; the first keeps it.

    ``settings`` (flag -> value as in JSON) must be the same everywhere. Raises ``InvalidRequest`` naming the flag that
    is not, and ``ParallelError`` for workers that do not come within ``timeout_s``.
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
    """The store itself; on loopback only, where that is enough."""
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
    """Somebody else's store, in which this rank is free. One that is taken may be that of the replica before, which
    has lost a worker and is about to end."""
    patience = min(deadline, time.monotonic() + _TAKEN_S)
    while True:
        _find(ranks, address, port, deadline)
        with contextlib.suppress(dist.DistError):  # it has ended meanwhile
            timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
            if store.add(f"taken/{ranks.index}", 1) == 1:
                return store
        if time.monotonic() > patience:
            raise InvalidRequest(
                f"flags tp_rank={ranks.tp_rank} pp_rank={ranks.pp_rank}: another worker at {address}:{port} is this"
                " rank already; give each its own, and each replica its own master_port",
                field="tp_rank",
            )
        time.sleep(_PROBE_S)


def _find(ranks: Ranks, address: str, port: int, deadline: float) -> None:
    """Until somebody listens. The store's own client logs a page for every time that it finds nobody."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PROBE_S * 10):
            return
        if time.monotonic() > deadline:
            raise ParallelError(
                f"nobody listens at master_addr={address} master_port={port}: start {ranks.name(0)} there, or mend the"
                " flags"
            )
        time.sleep(_PROBE_S)


def _compare(mine: Mapping[str, object], first: Mapping[str, object]) -> None:
    for name, value in mine.items():
        if first.get(name) != value:
            what, advice = f"flag {name}", "start all with the same flags but for their ranks"
            if name == INSTALLED:
                what, advice = name, "install the same packages for all"
            raise InvalidRequest(
                f"{what}={_written(value)}: the first worker of this replica has {name}="
                f"{_written(first.get(name))}; {advice}",
                field=name,
            )


def _wait_for_all(store: Store, ranks: Ranks, address: str, port: int, deadline: float) -> None:
    while missing := [index for index in range(ranks.size) if not store.check([f"here/{index}"])]:
        if store.check(["refused"]):
            raise ParallelError(f"the replica cannot start; {store.get('refused').decode()}")
        if time.monotonic() > deadline:
            raise ParallelError(
                f"{', '.join(map(ranks.name, missing))} did not come to {address}:{port}: start every rank of the"
                " replica, with the same tp_size and pp_size"
            )
        time.sleep(_PROBE_S)


def _written(value: object) -> str:
    """As on a command line."""
    if isinstance(value, bool):
        return "T" if value else "F"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _stay_on_loopback() -> None:
    """Gloo looks the host's name up otherwise, and uses what it resolves to."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
