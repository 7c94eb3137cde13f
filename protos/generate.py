"""Generate the Python stubs beside their contracts: ``python protos/generate.py [--types | --descriptor-set FILE]``.

A contract's directory is its proto package and the import path of its stubs, so nothing is patched afterwards:
``protos/tokasaurus/worker/v1/plan.proto`` becomes ``import tokasaurus.worker.v1.plan_pb2``.
"""

import argparse
import sys
import sysconfig
from importlib import resources
from pathlib import Path

from google import rpc
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def contracts() -> list[str]:
    """Return every contract, relative to ``protos/``, in a fixed order."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tokasaurus/**/*.proto"))


def include_paths() -> list[str]:
    """Return the directories that imports are searched in: this one, protobuf's own types, and google.rpc."""
    google_rpc = Path(next(iter(rpc.__path__)))
    return [str(ROOT), str(resources.files("grpc_tools") / "_proto"), str(google_rpc.parents[1])]


def services() -> list[str]:
    """Return the contracts that have a service."""
    return [name for name in contracts() if "\nservice " in (ROOT / name).read_text()]


def run_protoc(*outputs: str, only: list[str] | None = None) -> None:
    """Run the compiler over every contract, or ``only`` some. Raise ``RuntimeError`` if it rejects a contract."""
    arguments = ["protoc", *(f"-I{path}" for path in include_paths()), *outputs, *(only or contracts())]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed: {' '.join(arguments)}")


def generate_stubs() -> None:
    """Write ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` beside each contract."""
    run_protoc(f"--python_out={ROOT}", f"--pyi_out={ROOT}")
    run_protoc(f"--grpc_python_out={ROOT}", only=services())


def generate_service_types() -> None:
    """Write ``*_pb2_grpc.pyi``, which only mypy reads: with mypy-protobuf, a dependency of ``[dev]`` alone."""
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy_grpc"
    run_protoc(f"--plugin={plugin}", f"--mypy_grpc_out=quiet:{ROOT}", only=services())


def write_descriptor_set(target: Path) -> None:
    """Write the contracts (without their imports) as a serialized ``FileDescriptorSet``."""
    run_protoc(f"--descriptor_set_out={target}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--descriptor-set", type=Path, help="write the committed descriptor set instead of stubs")
    parser.add_argument("--types", action="store_true", help="write the service stubs' types for mypy instead")
    options = parser.parse_args(arguments)
    if options.types:
        generate_service_types()
    elif options.descriptor_set:
        write_descriptor_set(options.descriptor_set)
    else:
        generate_stubs()


if __name__ == "__main__":
    main(sys.argv[1:])
