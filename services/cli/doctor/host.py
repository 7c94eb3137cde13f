"""Checks ports, limits, shared memory, writable directories, and Docker."""

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
from services.common.model.files import BUILTIN_MODELS, SMOLLM2
from services.common.process.handover import listen

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 1 << 30  # of several ranks, for the buffers of NCCL and gloo
_ENOUGH_CONNECTIONS = 3072  # assumed if max_connections is auto
_OTHER_FILES = 1024  # of a gateway, besides its connections
_COMPILED = 5 << 30  # largest size of compilers' caches
_STORED = 1 << 30
_DOCKER_S = 20.0


def check_ports(machine: Machine) -> Iterator[Finding]:
    """Check the ports on which the start would listen. Port 0 is any free port."""
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
        yield ok("ports", "no fixed ports are configured")


def check_limits(machine: Machine) -> Iterator[Finding]:
    """Check the limits of this user's processes. Services raise the soft limit of open files to the hard limit."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = machine.config.max_connections
    wanted = (_ENOUGH_CONNECTIONS if most == "auto" else most) + _OTHER_FILES
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
            f"{text}; NCCL locks more memory with InfiniBand",
            "ulimit -l unlimited (LimitMEMLOCK=infinity of systemd, --ulimit memlock=-1 of docker)",
        )
    else:
        yield ok("limits", text)


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Check the shared memory through which ranks of a replica exchange data."""
    if not _SHARED_MEMORY.is_dir():
        yield unknown("shared memory", f"there is no {_SHARED_MEMORY} here")
        return
    usage = shutil.disk_usage(_SHARED_MEMORY)
    text = f"{amount(usage.free)} of {amount(usage.total)} free in {_SHARED_MEMORY}"
    if machine.ranks > 1 and usage.free < _LEAST_SHARED:
        yield warn(
            "shared memory",
            f"{text}; {machine.ranks} ranks need {amount(_LEAST_SHARED)}",
            "docker run --shm-size=8g (shm_size: of Compose), mount -o remount,size=8g /dev/shm, or remove old files",
        )
    else:
        yield ok("shared memory", text)


def check_directories(machine: Machine) -> Iterator[Finding]:
    """Check the directories to which the services write."""
    config = machine.config
    compiles = machine.on_cuda or config.torch_compile
    yield _directory("compile cache", config.compile_cache_dir, _COMPILED if compiles else 0, "compile_cache_dir=")
    if config.gateways and config.store_url != "none" and "://" not in config.store_dir:
        yield _directory("store", config.store_dir, _STORED, "store_dir=")
    if config.record_plans is not None:
        yield _directory("record", config.record_plans, _STORED, "record_plans=")
    if config.model not in (*BUILTIN_MODELS, SMOLLM2) and not Path(config.model).exists():
        yield _directory("model cache", HF_HUB_CACHE, 0, "HF_HOME in the environment")
    yield _directory("temporary files", tempfile.gettempdir(), 0, "TMPDIR in the environment")


def _directory(subject: str, directory: str, wanted: int, flag: str) -> Finding:
    """Check a directory by writing to it or its nearest parent. Permissions do not show read-only mounts."""
    path = Path(directory).expanduser().absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return fail(
            subject,
            f"{path} cannot be written to ({error.strerror})",
            f"choose a directory that this user may write with {flag}, or change its owner",
        )
    free = shutil.disk_usage(existing).free
    text = f"{path}: {amount(free)} free{'' if existing == path else ', is created at the start'}"
    if free < wanted:
        return warn(subject, f"{text}; it may take {amount(wanted)}", f"make room, or choose another disk with {flag}")
    return ok(subject, text)


def check_docker(machine: Machine) -> Iterator[Finding]:
    """Check Docker, which only containers need."""
    if shutil.which("docker") is None:
        yield unknown("docker", "no docker command here; only docker compose needs it")
        return
    engine, error = _run("docker", "version", "--format", "{{.Server.Version}}")
    if error:
        yield warn(
            "docker",
            f"its engine does not respond: {error}",
            "start it (systemctl start docker), join its group, or set DOCKER_HOST; only docker compose needs it",
        )
        return
    compose, error = _run("docker", "compose", "version", "--short")
    if error or not compose.lstrip("v")[:1].isdigit() or int(compose.lstrip("v").partition(".")[0]) < 2:
        yield warn("docker", f"engine {engine}, no Compose v2", "install the plugin docker-compose-plugin")
    else:
        yield ok("docker", f"engine {engine}, Compose {compose}")


def _run(*command: str) -> tuple[str, str]:
    """Run a command. Return its output, and the error or an empty string."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOCKER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    message = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip(), message if done.returncode else ""
