"""Converts a deployment config to the specifications of its child processes. It starts nothing."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.common.config import (
    ChosenDeploymentConfig,
    DeploymentConfig,
    GatewayConfig,
    SchedulerConfig,
    WorkerConfig,
)
from services.common.errors import InvalidRequest
from services.common.flags import ENV_PREFIX, Config
from services.common.host.resources import gpu_names, usable_processors
from services.common.process.handover import Handover
from services.common.rpc.channel import PLAIN, Dialer

Role = Literal["gateway", "scheduler", "worker"]


@dataclass(frozen=True)
class ChildSpec:
    """Specification of a child process: its flags and its address."""

    name: str  # for example "worker-0", or "worker-0-tp1-pp0" if a replica has several
    role: Role
    address: str  # gRPC target, or the gateway's base URL
    flags: tuple[str, ...]  # key=value
    environment: dict[str, str] = field(default_factory=dict)
    handover: Handover | None = None  # of a gateway
    unit: str = ""  # children of a unit are restarted together; an empty string means a unit of its own
    dialer: Dialer = PLAIN  # opens channels to its address

    @property
    def module(self) -> str:
        return f"services.{self.role}"


def plan_children(config: ChosenDeploymentConfig, runtime_dir: Path, gpus: Sequence[str] = ()) -> list[ChildSpec]:
    """Return the workers, schedulers and gateways of ``config``.

    Workers listen on Unix sockets in ``runtime_dir``, gateways on sockets that they get at their start. ``gpus`` is the
    result of ``choose_gpus``.
    """
    workers, schedulers, dialer = [], [], Dialer.of(config)
    for replica in range(config.dp_size):
        ranks = _plan_workers(config, replica, runtime_dir, gpus)
        workers += ranks
        address = f"127.0.0.1:{config.grpc_port + replica}"
        sockets = tuple(rank.address for rank in ranks)
        port = config.metrics_port and config.metrics_port + replica
        chosen = {"scheduler_listen": address, "worker_addresses": sockets, "metrics_port": port}
        flags = _flags(SchedulerConfig, config, chosen)
        schedulers.append(ChildSpec(f"scheduler-{replica}", "scheduler", address, flags, dialer=dialer))
    addresses = tuple(child.address for child in schedulers)
    level = config.gateway_log_level or config.log_level
    flags = _flags(GatewayConfig, config, {"scheduler_addresses": addresses, "log_level": level})
    scheme = "http" if config.http_cert is None else "https"
    url = f"{scheme}://{_local_host(config.host)}:{config.port}"
    handovers = [Handover(str(runtime_dir), index, config.gateways) for index in range(config.gateways)]
    gateways = [ChildSpec(handover.name, "gateway", url, flags, handover=handover) for handover in handovers]
    return [*workers, *schedulers, *gateways]


def choose_gpus(config: DeploymentConfig, visible: str | None) -> list[str]:
    """Return a GPU for each worker, as in ``CUDA_VISIBLE_DEVICES``, or nothing if no choice is needed.

    ``visible`` contains the names of all GPUs, separated by commas, or is None if they are unknown. Raises
    ``InvalidRequest`` if there are too few.
    """
    workers = config.dp_size * config.tp_size * config.pp_size
    if workers == 1 or config.device == "cpu":
        return []
    if visible is None:
        return [str(index) for index in range(workers)]
    gpus = gpu_names(visible)
    if not gpus and config.device == "auto":
        return []
    if len(gpus) < workers:
        raise InvalidRequest(
            f"flags dp_size={config.dp_size} tp_size={config.tp_size} pp_size={config.pp_size}: {workers} workers need"
            f" a GPU each, but {len(gpus)} are visible ({visible or 'none'}); lower them, add GPUs to"
            " CUDA_VISIBLE_DEVICES, or use device=cpu",
            field="dp_size",
        )
    return gpus[:workers]


def child_environment(spec: ChildSpec, environment: dict[str, str]) -> dict[str, str]:
    """Return the child's environment. Its flags are on its command line, so variables with flags are removed."""
    return {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)} | spec.environment


def _plan_workers(
    config: ChosenDeploymentConfig, replica: int, runtime_dir: Path, gpus: Sequence[str]
) -> list[ChildSpec]:
    """Return the workers of one replica in the order of their ranks."""
    size = config.tp_size * config.pp_size
    shared: dict[str, object] = {"dp_rank": replica}
    if size > 1:
        shared["master_port"] = config.master_port + replica
    if config.dp_size * size > 1 and config.torch_num_threads is None:
        shared["torch_num_threads"] = max(1, usable_processors() // (config.dp_size * size))
    workers = []
    ranks = itertools.product(range(config.pp_size), range(config.tp_size))
    for index, (pp_rank, tp_rank) in enumerate(ranks, start=replica * size):
        name = f"worker-{replica}-tp{tp_rank}-pp{pp_rank}" if size > 1 else f"worker-{replica}"
        socket = f"unix:{runtime_dir}/{name}.sock"
        port = config.metrics_port and config.metrics_port + config.dp_size + index
        own = {"worker_listen": socket, "tp_rank": tp_rank, "pp_rank": pp_rank, "metrics_port": port}
        environment = {"CUDA_VISIBLE_DEVICES": gpus[index]} if gpus else {}
        flags = _flags(WorkerConfig, config, shared | own)
        workers.append(ChildSpec(name, "worker", socket, flags, environment, unit=f"worker-{replica}"))
    return workers


def _flags(kind: type[Config], config: DeploymentConfig, chosen: dict[str, object]) -> tuple[str, ...]:
    """Return the flags of one child: those chosen for it, and those that differ from the defaults."""
    child = config.part(kind).model_copy(update=chosen)
    return tuple(f"{name}={value}" for name, value in child.changed().items())


def _local_host(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
