"""From one deployment config to the child processes it stands for. Pure: nothing is started here."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.common.config import DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.flags import ENV_PREFIX, Config
from services.common.handover import Handover

Role = Literal["gateway", "scheduler", "worker"]


@dataclass(frozen=True)
class ChildSpec:
    """One child: how to start it and where it answers."""

    name: str  # e.g. "worker-0"
    role: Role
    address: str  # gRPC target, or the gateway's base URL
    flags: tuple[str, ...]  # key=value
    environment: dict[str, str] = field(default_factory=dict)
    handover: Handover | None = None  # a gateway's

    @property
    def module(self) -> str:
        return f"services.{self.role}"


def plan_children(config: DeploymentConfig, runtime_dir: Path) -> list[ChildSpec]:
    """The workers, schedulers and gateways of ``config``. Workers listen on unix sockets in ``runtime_dir``, gateways
    on sockets that they are given at their start."""
    workers, schedulers = [], []
    for rank in range(config.dp_size):
        socket = f"unix:{runtime_dir}/worker-{rank}.sock"
        chosen = {"worker_listen": socket, "dp_rank": rank}
        if config.dp_size > 1 and config.torch_num_threads is None:
            chosen["torch_num_threads"] = max(1, (os.cpu_count() or 1) // config.dp_size)
        flags = _flags(WorkerConfig, config, chosen)
        workers.append(ChildSpec(f"worker-{rank}", "worker", socket, flags, _device_environment(config, rank)))

        address = f"127.0.0.1:{config.grpc_port + rank}"
        flags = _flags(SchedulerConfig, config, {"scheduler_listen": address, "worker_address": socket})
        schedulers.append(ChildSpec(f"scheduler-{rank}", "scheduler", address, flags))
    flags = _flags(GatewayConfig, config, {"scheduler_addresses": tuple(child.address for child in schedulers)})
    url = f"http://{_reachable(config.host)}:{config.port}"
    handovers = [Handover(str(runtime_dir), index, config.gateways) for index in range(config.gateways)]
    gateways = [ChildSpec(handover.name, "gateway", url, flags, handover=handover) for handover in handovers]
    return [*workers, *schedulers, *gateways]


def child_environment(spec: ChildSpec, environment: dict[str, str]) -> dict[str, str]:
    """The child's environment: flags travel on its command line only, so ours must not reach it a second time."""
    return {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)} | spec.environment


def _flags(kind: type[Config], config: DeploymentConfig, chosen: dict[str, object]) -> tuple[str, ...]:
    """The flags of one child: what was chosen for it, and what differs from the defaults."""
    values = {}
    for name, info in kind.model_fields.items():
        value = chosen.get(name, getattr(config, name))
        if value is not None and value != info.default:
            values[name] = value
    return tuple(f"{name}={_as_text(value)}" for name, value in values.items())


def _as_text(value: object) -> str:
    match value:
        case bool():
            return "T" if value else "F"
        case tuple():
            return ",".join(value)
        case _:
            return str(value)


def _device_environment(config: DeploymentConfig, rank: int) -> dict[str, str]:
    """Each replica sees one GPU of its own; a CPU replica needs none."""
    if config.dp_size == 1 or config.device == "cpu":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(config.dp_size)]
    return {"CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]}


def _reachable(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
