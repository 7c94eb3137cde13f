"""Writes a Docker Compose overlay for several replicas and ranks: the command ``toka-compose dp=2 tp=2 pp=1``.

Compose has no loops, so each combination has its own file. ``docker/compose.gpu.yml`` includes the file that
``TOKA_DP``, ``TOKA_TP`` and ``TOKA_PP`` select. A replica consists of a scheduler and one container of workers
(``toka-workers``), because ranks can access each other's memory only within a container. The text depends only on the
flags.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.common.config import fail, from_command_line
from services.common.flags import Config, Excludes, Int, Strings, distinct, each

WORKER_PORT, SCHEDULER_PORT = 10410, 10310  # in their containers
CUDA_PYTHON_IMAGE = "python:3.12.13-slim-bookworm"
MOST_RANKS = 8  # of a replica; docker/prometheus/prometheus.yml scrapes this number of ports

_ARE_GPUS = each(lambda name: name.replace("-", "").isalnum(), "is neither a number nor a UUID; see nvidia-smi -L")


class ComposeConfig(Config):
    """Flags of ``toka-compose``."""

    dp: Int = Field(1, ge=1, le=64, description="replicas: a scheduler and a container of workers each")
    tp: Int = Field(1, ge=1, le=MOST_RANKS, description="tensor-parallel ranks of a replica")
    pp: Int = Field(1, ge=1, le=MOST_RANKS, description="pipeline stages of a replica")
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: Annotated[Strings, _ARE_GPUS, distinct("each rank needs its own GPU"), Excludes(device="cpu")] = Field(
        (), description="NVIDIA's numbers or UUIDs, one for each rank; default: from 0 on"
    )
    grpc_port: Int = Field(
        SCHEDULER_PORT, ge=1, le=65000, description="direct gRPC on loopback: replica r has grpc_port + r"
    )
    output: str = Field(
        "", description="the file; -: stdout; default: docker/DEVICE/dpN-tpN-ppN.yml, gpu for cuda, in this directory"
    )

    @model_validator(mode="after")
    def _a_gpu_for_each_rank(self) -> "ComposeConfig":
        if self.ranks > MOST_RANKS:
            raise ValueError(
                f"flags tp={self.tp} pp={self.pp}: a replica of {self.ranks} ranks, but a container has {MOST_RANKS}"
                " at most; lower them, or start its workers on several hosts (docs/deploy-hosts.md)"
            )
        if self.gpus and len(self.gpus) != self.dp * self.ranks:
            raise ValueError(
                f"flag gpus={','.join(self.gpus)}: expected {self.dp * self.ranks} GPUs, one for each of the"
                f" dp={self.dp} x tp={self.tp} x pp={self.pp} ranks"
            )
        return self

    @property
    def ranks(self) -> int:
        """The number of ranks of a replica."""
        return self.tp * self.pp

    @property
    def path(self) -> str:
        """The path of the file, for Compose's ``-f``."""
        directory = {"cuda": "gpu", "cpu": "cpu"}[self.device]
        return self.output or f"docker/{directory}/dp{self.dp}-tp{self.tp}-pp{self.pp}.yml"


def main() -> None:
    """Write the file and print the command that uses it."""
    config = from_command_line(ComposeConfig)
    if config.output == "-":
        print(overlay(config), end="")
        return
    try:
        Path(config.path).parent.mkdir(exist_ok=True)
        Path(config.path).write_text(overlay(config))
    except OSError as error:
        fail(f"{config.path}: {error.strerror}; run it in the repository's directory")
    print(f"wrote {config.path}. Start it with:\n\n  {command(config)} up --build --wait")


def command(config: ComposeConfig) -> str:
    """Return the docker compose command without ``up`` or ``down``."""
    if config.device == "cuda" and not config.output:
        sizes = f"TOKA_DP={config.dp} TOKA_TP={config.tp} TOKA_PP={config.pp}"
        return f"{sizes} docker compose -f docker-compose.yml -f docker/compose.gpu.yml"
    return f"docker compose -f docker-compose.yml -f {config.path}"


def overlay(config: ComposeConfig) -> str:
    """Return the text of the file.

    Replica 0 has the services ``worker`` and ``scheduler`` of docker-compose.yml, replica r ``worker-r`` and
    ``scheduler-r``.
    """
    head = f"# Written by: toka-compose {' '.join(_arguments(config))}\nservices:\n"
    replicas = [
        part for replica in range(config.dp) for part in (_worker(config, replica), _scheduler(config, replica))
    ]
    return head + "\n".join([*replicas, _gateway(config)])


def _arguments(config: ComposeConfig) -> list[str]:
    always: dict[str, object] = {"dp": config.dp, "tp": config.tp, "pp": config.pp, "device": config.device}
    return [f"{name}={value}" for name, value in (always | config.changed()).items() if name != "output"]


def _worker(config: ComposeConfig, replica: int) -> str:
    lines = _begin("worker", replica)
    environment = {"TOKA_DEVICE": config.device, "TOKA_DP_RANK": f'"{replica}"'}
    ports = range(WORKER_PORT, WORKER_PORT + config.ranks)
    if config.ranks > 1:
        lines += ["entrypoint: [python, -m, services.common.process.init, toka-workers]"]
        environment |= {"TOKA_TP_SIZE": f'"{config.tp}"', "TOKA_PP_SIZE": f'"{config.pp}"'}
        environment |= {"TOKA_PP_LAYERS": "${TOKA_PP_LAYERS:-}"} if config.pp > 1 else {}
        environment |= {"TOKA_ASYNC_TP_THRESHOLD": "${TOKA_ASYNC_TP_THRESHOLD:-}"} if config.tp > 1 else {}
    lines += _mapping("environment", environment)
    # Prometheus resolves each rank by these names.
    aliases = [f"toka-rank-{rank}" for rank in range(config.ranks)]
    lines += ["networks:", "  default:", f"    aliases: [{', '.join(aliases)}]"]
    # The first start on a GPU, with an empty volume `cache`, compiles for minutes.
    lines += [
        "healthcheck:",
        f"  test: [CMD, python, -m, services.common.rpc.probe, {', '.join(f'127.0.0.1:{port}' for port in ports)}]",
        "  interval: 5s",
        f"  timeout: {max(15, 4 * config.ranks)}s",
        f"  start_period: {900 if config.device == 'cuda' else 180}s",
        "  retries: 5",
    ]
    return _service("worker", replica, lines + (_gpu(config, replica) if config.device == "cuda" else []))


def _gpu(config: ComposeConfig, replica: int) -> list[str]:
    """Return the lines for a worker on GPUs: its image and its devices."""
    names = config.gpus or [str(index) for index in range(config.dp * config.ranks)]
    own = names[replica * config.ranks : (replica + 1) * config.ranks]
    lines = ["image: tokasaurus-worker-cuda"]
    if replica == 0:
        lines += ["build:", "  args:", "    VARIANT: cuda", f"    PYTHON_IMAGE: {CUDA_PYTHON_IMAGE}"]
    if config.ranks > 1:  # NCCL uses shared memory between GPUs without a direct link, and pins some of it
        lines += ["shm_size: ${TOKA_SHM_SIZE:-8gb}", "ulimits:", "  memlock: -1"]
    devices = ", ".join(f'"{name}"' for name in own)
    return [
        *lines,
        "deploy:",
        "  resources:",
        "    reservations:",
        "      devices:",
        "        - driver: nvidia",
        f"          device_ids: [{devices}]",
        "          capabilities: [gpu]",
    ]


def _scheduler(config: ComposeConfig, replica: int) -> str:
    worker = _name("worker", replica)
    addresses = ",".join(f"{worker}:{WORKER_PORT + rank}" for rank in range(config.ranks))
    environment = {"TOKA_WORKER_ADDRESSES": addresses}
    if config.pp > 1:
        environment |= {"TOKA_PP_SIZE": f'"{config.pp}"'}
        environment |= {"TOKA_PP_NUM_BUFFER_STAGES": "${TOKA_PP_NUM_BUFFER_STAGES:-}"}
    lines = [*_begin("scheduler", replica), f"hostname: {_name('scheduler', replica)}"]
    lines += _mapping("environment", environment)
    if replica > 0 or config.grpc_port != SCHEDULER_PORT:
        lines += ["ports: !override", f"  - 127.0.0.1:{config.grpc_port + replica}:{SCHEDULER_PORT}"]
    if replica > 0:
        lines += ["depends_on: !override", *_healthy(worker)]
    return _service("scheduler", replica, lines)


def _gateway(config: ComposeConfig) -> str:
    schedulers = [_name("scheduler", replica) for replica in range(config.dp)]
    addresses = ",".join(f"{name}:{SCHEDULER_PORT}" for name in schedulers)
    lines = _mapping("environment", {"TOKA_SCHEDULER_ADDRESSES": addresses})
    further = [line for name in schedulers[1:] for line in _healthy(name)]
    return _service("gateway", 0, lines + (["depends_on:", *further] if further else []))


def _begin(role: str, replica: int) -> list[str]:
    """Return the lines of a further replica's service, which extends the one in docker-compose.yml."""
    if replica == 0:
        return []
    return ["extends:", "  file: docker-compose.yml", f"  service: {role}", "build: !reset null", "pull_policy: never"]


def _name(role: str, replica: int) -> str:
    return f"{role}-{replica}" if replica else role


def _service(role: str, replica: int, lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in [f"  {_name(role, replica)}:", *(f"    {line}" for line in lines)])


def _mapping(name: str, values: dict[str, str]) -> list[str]:
    return [f"{name}:", *(f"  {key}: {value}" for key, value in values.items())]


def _healthy(service: str) -> list[str]:
    return [f"  {service}:", "    condition: service_healthy"]


if __name__ == "__main__":
    main()
