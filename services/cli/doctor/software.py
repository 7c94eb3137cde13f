"""Checks the GPUs, their driver, and the installed packages."""

import shutil
import sys
from collections.abc import Iterator

from services.cli.doctor.findings import Finding, amount, fail, from_error, ok, unknown, warn
from services.cli.doctor.machine import Machine, installed
from services.common.errors import InvalidRequest
from services.launcher.deployment import choose_gpus

_PACKAGES = ("triton", "flashinfer-python", "numpy", "grpcio", "protobuf", "tokenizers")
_COMPILERS = ("cc", "gcc", "clang")
_TAKEN_SHARE = 0.05  # of a GPU's memory; more means that other programs use it


def check_packages(machine: Machine) -> Iterator[Finding]:
    """Check the versions in packages' metadata, without loading them."""
    found = {name: version for name in _PACKAGES if (version := installed(name))}
    python = ".".join(map(str, sys.version_info[:3]))
    yield ok("packages", ", ".join([f"python {python}", *(f"{name} {version}" for name, version in found.items())]))
    torch = machine.torch
    if torch is None:
        yield warn(
            "torch", "not installed here: no worker can start", "pip install 'tokasaurus[worker]', or use containers"
        )
        return
    built_for = "CPUs" if torch.cuda is None else f"CUDA {_dotted(torch.cuda)}"
    text = f"{torch.version}, built for {built_for}"
    driver, device = machine.driver, machine.config.device
    if driver.gpus and torch.cuda is None and device != "cpu":
        say = fail if device == "cuda" else warn
        yield say("torch", f"{text}, but there are GPUs", "install PyPI's build of torch, or use device=cpu")
    elif driver.gpus and torch.cuda is not None and driver.cuda[0] < torch.cuda[0]:
        yield fail(
            "torch",
            f"{text}, and driver {driver.version} supports CUDA up to {_dotted(driver.cuda)}",
            f"update the driver, or install a torch that is built for CUDA {driver.cuda[0]}",
        )
    else:
        yield ok("torch", text)
    if machine.on_cuda and machine.planned_gpu is None:
        yield from _compilers()


def _compilers() -> Iterator[Finding]:
    if not any(map(shutil.which, _COMPILERS)):
        yield fail("compiler", "Triton compiles its kernels' launchers, but there is no C compiler", "apt install gcc")
    if installed("flashinfer-python") is None:
        yield warn(
            "flashinfer", "not installed: Triton's kernels are used instead", "pip install 'tokasaurus[worker-cuda]'"
        )
    elif shutil.which("nvcc") is None:
        yield warn(
            "flashinfer",
            "no nvcc to compile its kernels: Triton's are used where it has no compiled ones",
            "install the CUDA toolkit",
        )


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """Check the number, the free memory and the links of the GPUs."""
    config, driver = machine.config, machine.driver
    if machine.planned_gpu is not None:
        yield ok(
            "gpu",
            f"planned: {machine.workers} of {amount(machine.planned_gpu)} each, GPUs of this machine were not checked",
        )
        return
    if driver.trouble:
        if config.device == "cuda":
            yield fail("gpu", driver.trouble, "install NVIDIA's driver, give the container --gpus all, or device=cpu")
        else:
            yield unknown("gpu", f"{driver.trouble}; workers run on the CPU")
        return
    yield ok("driver", f"{driver.version}, supports CUDA {_dotted(driver.cuda)}")
    for gpu in driver.gpus:
        text = f"{gpu.index}: {gpu.name}, capability {_dotted(gpu.capability)}"
        text += f", {amount(gpu.free)} of {amount(gpu.total)} free"
        if gpu in machine.gpus and gpu.total - gpu.free > _TAKEN_SHARE * gpu.total:
            yield warn(
                "gpu",
                f"{text}; other programs use it",
                "end them (nvidia-smi shows them), or choose others in CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok("gpu", text if gpu in machine.gpus else f"{text}; not in CUDA_VISIBLE_DEVICES")
    if config.device == "cpu":
        return
    if machine.has_mig_instances:
        yield unknown("gpu", f"{machine.visible}: memory and number of MIG instances are not checked", "--gpu-memory")
        return
    try:
        choose_gpus(config, machine.visible)
    except InvalidRequest as error:
        yield from_error("gpu", error.message)
        return
    if machine.workers > len(machine.gpus):  # choose_gpus does not raise if there are none
        say = fail if config.device == "cuda" else warn
        yield say("gpu", "CUDA_VISIBLE_DEVICES shows none", "show some in CUDA_VISIBLE_DEVICES, or use device=cpu")
    elif machine.ranks > 1:
        yield from _links(machine)


def _links(machine: Machine) -> Iterator[Finding]:
    """Check the links between the GPUs of a replica, whose ranks exchange activations in every layer."""
    for replica in range(machine.config.dp_size):
        gpus = machine.gpus[replica * machine.ranks : (replica + 1) * machine.ranks]
        pairs = [(one, other) for one in gpus for other in gpus if one.index < other.index]
        unlinked = [f"{one.index}-{other.index}" for one, other in pairs if other.index not in one.peers]
        slow = [f"{one.index}-{other.index}" for one, other in pairs if other.index not in one.nvlinks]
        name = "-".join(str(gpu.index) for gpu in gpus)
        if unlinked:
            yield warn(
                "links",
                f"replica {replica}: GPUs {', '.join(unlinked)} cannot read each other's memory; ranks exchange through"
                " the host's",
                "choose GPUs with NVLink in CUDA_VISIBLE_DEVICES (nvidia-smi topo -m), more replicas, or pp_size for"
                " tp_size",
            )
        elif slow and machine.config.tp_size > 1:
            yield warn(
                "links",
                f"replica {replica}: no NVLink between GPUs {', '.join(slow)}",
                "tp_size is slow over PCIe: use dp_size or pp_size instead if the model fits",
            )
        else:
            yield ok("links", f"replica {replica}: GPUs {name} reach each other{'' if slow else ' by NVLink'}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
