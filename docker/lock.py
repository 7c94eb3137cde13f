"""Writes ``docker/locks``: every package of every image, with its version and the hashes that it may have.

``make locks`` runs it with the path of ``uv`` as the argument. The locks name no index: pip takes packages from where
it is told to, and refuses those with other hashes. They hold for Linux, any processor, Python 3.11 and later.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "docker" / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Of each lock; the largest first, since what one has settled holds for those after it.
EXTRAS = {
    "worker-cuda": ("worker-cuda", "worker-transformers"),
    "worker": ("worker", "worker-transformers"),
    "scheduler": ("scheduler",),
    "gateway": ("gateway", "postgres"),
}
# What only torch's builds for CUDA ask for.
CUDA_LIBRARY = re.compile(r"(nvidia|cuda)-|triton=")
# torch's builds for CPUs, which have the same version, are in an index of their own: these may be installed as well.
CPU_BUILDS = ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",)  # Python 3.11, x86-64


def main() -> None:
    uv = sys.argv[1]
    LOCKS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        known = Path(directory) / "known.txt"
        settled = {pinned_torch() + "\n": None}
        command = [uv, "pip", "compile", "--quiet", "--constraint", str(known), "--generate-hashes"]
        command += ["--universal", "--python-version", "3.11", "--no-header", "--no-annotate"]
        for name, extras in EXTRAS.items():
            known.write_text("".join(settled))
            wanted = [argument for extra in extras for argument in ("--extra", extra)]
            lock = packages(run([*command, "pyproject.toml", *wanted]))
            settled |= dict.fromkeys(each for each in lock if not CUDA_LIBRARY.match(each))
            if name == "worker":
                write("torch-cuda", [each for each in lock if CUDA_LIBRARY.match(each)])
                lock = [each for each in lock if not CUDA_LIBRARY.match(each)]
            write(name, [with_cpu_builds(each) for each in lock])
        known.write_text("".join(settled))
        write("build", packages(run([*command, "-"], "\n".join(PROJECT["build-system"]["requires"]))))


def pinned_torch() -> str:
    """The version that is developed and tested with."""
    [torch] = [each for each in PROJECT["project"]["optional-dependencies"]["dev"] if each.startswith("torch==")]
    return torch


def run(command: list[str], requirements: str = "") -> str:
    return subprocess.run(command, cwd=ROOT, input=requirements, stdout=subprocess.PIPE, text=True, check=True).stdout


def packages(lock: str) -> list[str]:
    """Each with its hashes. All are for Linux, so none says so."""
    lock = re.sub(r" (;|and) sys_platform == 'linux'", "", lock)
    return [each for each in re.split(r"(?m)^(?=\S)", lock) if each]


def with_cpu_builds(package: str) -> str:
    if not package.startswith("torch=="):
        return package
    return package.rstrip() + "".join(f" \\\n    --hash=sha256:{build}" for build in CPU_BUILDS) + "\n"


def write(name: str, lock: list[str]) -> None:
    (LOCKS / f"{name}.txt").write_text("# Written by `make locks`.\n" + "".join(lock))


if __name__ == "__main__":
    main()
