"""Ports, limits, shared memory, places to write to, and Docker."""

import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from services.cli.doctor.findings import Finding, amount, fail, ok, unknown, warn
from services.cli.doctor.machine import Machine
from services.common.errors import Unavailable
from services.common.process.handover import listen

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 1 << 30  # for ranks: NCCL's and gloo's buffers
_ENOUGH_CONNECTIONS = 3072  # where max_connections is auto
_FILES_BESIDE = 1024  # of a gateway, beside its connections
_COMPILED = 5 << 30  # what compilers' caches may come to
_STORED = 1 << 30
_DOCKER_S = 20.0


def look_at_ports(machine: Machine) -> Iterator[Finding]:
    """Those that the start would listen on. 0 is any that is free."""
    config = machine.config
    wanted: list[tuple[str, int, str]] = []
    if config.gateways:
        wanted += [(config.host, config.port, "port"), (config.admin_host, config.admin_port, "admin_port")]
    replicas = range(config.dp_size) if config.grpc_port else ()
    wanted += [("127.0.0.1", config.grpc_port + replica, "grpc_port") for replica in replicas]
    pages = config.dp_size * (1 + machine.ranks) if config.metrics_port else 0
    wanted += [(config.metrics_host, config.metrics_port + page, "metrics_port") for page in range(pages)]
    free = []
    for host, port, flag in wanted:
        if not port:
            continue
        try:
            for listener in listen(host, port):
                listener.close()
            free.append(f"{host}:{port}")
        except Unavailable as error:
            reason = error.message.partition("(")[2].partition(")")[0]
            yield fail(
                "ports",
                f"cannot listen on {host}:{port} ({reason})",
                f"stop what runs there (ss -ltnp 'sport = :{port}' names it), or choose another with {flag}=",
            )
    if free:
        yield ok("ports", f"free: {', '.join(free)}")
    elif not any(port for _, port, _ in wanted):
        yield ok("ports", "none is asked for that would have to be free")


def look_at_limits(machine: Machine) -> Iterator[Finding]:
    """Of this user's processes. Services raise the soft limit of files to the hard one themselves."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = machine.config.max_connections
    wanted = (_ENOUGH_CONNECTIONS if most == "auto" else most) + _FILES_BESIDE
    if machine.config.gateways and files != resource.RLIM_INFINITY and files < wanted:
        yield warn(
            "limits",
            f"{files:,} open files at most, and a gateway may need {wanted:,}",
            f"ulimit -Hn {wanted} (LimitNOFILE= of systemd, --ulimit nofile= of docker), or a lower max_connections=",
        )
    else:
        yield ok("limits", "open files: " + ("any number" if files == resource.RLIM_INFINITY else f"{files:,}"))
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    any_number = locked == resource.RLIM_INFINITY
    text = f"locked memory: {'any' if any_number else amount(locked)}"
    if machine.on_cuda and machine.ranks > 1 and not any_number:
        yield warn(
            "limits",
            f"{text}; NCCL locks more where it uses InfiniBand",
            "ulimit -l unlimited (LimitMEMLOCK=infinity of systemd, --ulimit memlock=-1 of docker)",
        )
    else:
        yield ok("limits", text)


def look_at_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Ranks of a replica exchange through it."""
    if not _SHARED_MEMORY.is_dir():
        yield unknown("shared memory", f"there is no {_SHARED_MEMORY} here")
        return
    usage = shutil.disk_usage(_SHARED_MEMORY)
    text = f"{amount(usage.free)} of {amount(usage.total)} free in {_SHARED_MEMORY}"
    if machine.ranks > 1 and usage.free < _LEAST_SHARED:
        yield warn(
            "shared memory",
            f"{text}; {machine.ranks} ranks want {amount(_LEAST_SHARED)}",
            "docker run --shm-size=8g (shm_size: of Compose), mount -o remount,size=8g /dev/shm, or remove old files",
        )
    else:
        yield ok("shared memory", text)


def look_at_places(machine: Machine) -> Iterator[Finding]:
    """Directories that the services write to."""
    config = machine.config
    compiles = machine.on_cuda or config.torch_compile
    yield _place("compile cache", config.compile_cache_dir, _COMPILED if compiles else 0, "compile_cache_dir=")
    if config.gateways and config.store_url != "none" and "://" not in config.store_dir:
        yield _place("store", config.store_dir, _STORED, "store_dir=")
    if config.record_plans is not None:
        yield _place("record", config.record_plans, _STORED, "record_plans=")
    if config.model != "builtin" and not Path(config.model).exists():
        yield _place("model cache", HF_HUB_CACHE, 0, "HF_HOME in the environment")
    yield _place("temporary files", tempfile.gettempdir(), 0, "TMPDIR in the environment")


def _place(subject: str, directory: str, wanted: int, flag: str) -> Finding:
    """What is there of ``directory`` is tried by writing: modes do not know of read-only mounts."""
    path = Path(directory).expanduser().absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return fail(
            subject,
            f"{path} cannot be written to ({error.strerror})",
            f"choose a directory that this user may write with {flag}, or change its owner",
        )
    free = shutil.disk_usage(there).free
    text = f"{path}: {amount(free)} free{'' if there == path else ', is made at the start'}"
    if free < wanted:
        return warn(subject, f"{text}; it may take {amount(wanted)}", f"make room, or choose another disk with {flag}")
    return ok(subject, text)


def look_at_docker(machine: Machine) -> Iterator[Finding]:
    """Only containers need it."""
    if shutil.which("docker") is None:
        yield unknown("docker", "no docker command here; only docker compose needs it")
        return
    engine, trouble = _run("docker", "version", "--format", "{{.Server.Version}}")
    if trouble:
        yield warn(
            "docker",
            f"its engine does not answer: {trouble}",
            "start it (systemctl start docker), join its group, or set DOCKER_HOST; only docker compose needs it",
        )
        return
    compose, trouble = _run("docker", "compose", "version", "--short")
    if trouble or not compose.lstrip("v")[:1].isdigit() or int(compose.lstrip("v").partition(".")[0]) < 2:
        yield warn("docker", f"engine {engine}, no Compose v2", "install the plugin docker-compose-plugin")
    else:
        yield ok("docker", f"engine {engine}, Compose {compose}")


def _run(*command: str) -> tuple[str, str]:
    """Its output; and what went wrong, if anything did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOCKER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip(), said if done.returncode else ""
