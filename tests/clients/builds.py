"""The example clients, built as their READMEs say, in a copy of their directory."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GO_SOURCES = Path("/usr/share/gocode")
JARS = Path("/usr/share/java")
# What Debian's grpc-java needs, so that nobody asks Maven's registry.
JAR_PATTERNS = (
    "grpc-*.jar", "protobuf.jar", "proto-google-common-protos.jar", "netty-*.jar", "guava.jar",
    "perfmark-api.jar", "geronimo-annotation-1.3-spec.jar",
)  # fmt: skip
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET_TIMEOUT", "ECONNRESET")


@dataclass(frozen=True)
class Built:
    """How to start a client: its address comes behind ``command``."""

    command: Sequence[str]
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    tls: bool = True  # its libraries, as they are here, speak it


def build(language: str, directory: Path) -> Built:
    """Skips where a tool is missing. ``directory``: an empty one, of the test."""
    for package in ("common", "scheduler"):
        contracts = Path("protos/tokasaurus", package, "v1")
        shutil.copytree(ROOT / contracts, directory / contracts, ignore=shutil.ignore_patterns("*_pb2*"))
    clients = directory / "examples" / "clients"
    shutil.copytree(ROOT / "examples/clients", clients, ignore=shutil.ignore_patterns("node_modules", "target"))
    return {"python": _python, "node": _node, "go": _go, "java": _java}[language](clients / language)


def _python(at: Path) -> Built:
    (line,) = [line for line in (at / "README.md").read_text().splitlines() if line.startswith("python -m grpc_tools")]
    _run(at, "sh", "-c", line, PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    # Without `site`, so that this repository's own stubs, which are installed here, are not found.
    return Built([sys.executable, "-S", "client.py"], at, {"PYTHONPATH": sysconfig.get_path("purelib")})


def _node(at: Path) -> Built:
    _need("node", "npm")
    offline = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        done = subprocess.run(["npm", "ci", *offline], cwd=at, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry did not answer")
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip("npm's registry cannot be reached")
    assert done.returncode == 0, done.stderr
    return Built(["node", "client.js"], at)


def _go(at: Path) -> Built:
    _need("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    if missing := [name for name in ("grpc", "protobuf") if not (GO_SOURCES / "src/google.golang.org" / name).exists()]:
        pytest.skip(f"needs google.golang.org/{missing[0]} in {GO_SOURCES}")
    _run(at, "./generate.sh")
    path = at.parent / "gopath"
    shutil.copytree(at, path / "src/example.com/tokasaurus-client")
    modules = {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{path}:{GO_SOURCES}"}
    _run(at, "go", "build", "-o", "client", "example.com/tokasaurus-client", **modules)
    return Built(["./client"], at)


def _java(at: Path) -> Built:
    _need("java", "javac", "protoc", "grpc_java_plugin")
    found = {pattern: sorted(map(str, JARS.glob(pattern))) for pattern in JAR_PATTERNS}
    if missing := [pattern for pattern, jars in found.items() if not jars]:
        pytest.skip(f"needs {', '.join(missing)} in {JARS}")
    jars = os.pathsep.join(jar for several in found.values() for jar in several)
    sources, classes = at / "target/sources", at / "target/classes"
    sources.mkdir(parents=True)
    plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
    outputs = [f"--java_out={sources}", f"--grpc-java_out={sources}"]
    roots = [(at / "../../../protos").resolve(), at.parent]
    contracts = [str(path) for path in (*roots[0].glob("**/*.proto"), *roots[1].glob("google/**/*.proto"))]
    _run(at, "protoc", *(f"-I{root}" for root in roots), plugin, *outputs, *contracts)
    files = [str(path) for path in (*sources.glob("**/*.java"), *(at / "src").glob("**/*.java"))]
    _run(at, "javac", "-nowarn", "-proc:none", "-cp", jars, "-d", str(classes), *files)
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{classes}{os.pathsep}{jars}", "example.Client"]
    return Built(command, at, tls=False)  # Debian's netty is built without ALPN


def _run(at: Path, *command: str, **environment: str) -> None:
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, f"{command[0]}: {done.stderr or done.stdout}"


def _need(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
