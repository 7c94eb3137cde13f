"""What a deployment writes, other users of the host can neither read nor write, whatever the umask of its user."""

import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

OTHERS = 0o077
NOBODY = 65534
PROMPT = "Question: 2 + 2?\nAnswer:"
CONNECT = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def home(tmp_path) -> Path:
    """A home directory, and a directory for temporary files, that other users may enter."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    return tmp_path / "home"


def start(home: Path, *flags: str) -> subprocess.Popen:
    """Start ``toka`` with the umask 0: what it creates is open unless it sees to that itself."""
    command = [sys.executable, "-m", "services.launcher", "port=0", "grpc_port=0", "device=cpu", *flags]
    command += [
        f"store_dir={home / 'share' / 'store'}",
        "torch_num_threads=1",
        "kv_cache_num_tokens=2048",
        f"record_plans={home / 'plans'}",
    ]
    environment = os.environ | {"HOME": str(home), "TMPDIR": str(home.parent / "tmp"), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=environment, umask=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def modes_below(*directories: Path) -> dict[Path, int]:
    """The permissions of all files, directories and sockets."""
    found = [path for directory in directories for path in directory.rglob("*") if not path.is_symlink()]
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in found if path.exists()}


@pytest.mark.timeout(300)
def test_other_users_can_read_nothing(home):
    process = start(home, "log_level=WARNING")
    try:
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        with httpx.Client(base_url=f"{url}/v1", timeout=120, trust_env=False) as client:
            model = client.get("/models").json()["data"][0]["id"]
            answer = client.post("/responses", json={"model": model, "input": PROMPT, "max_output_tokens": 4})
            assert answer.status_code == 200, answer.text
            lines = {"file": ("a.jsonl", b'{"prompt": "a secret"}\n')}
            assert client.post("/files", data={"purpose": "batch"}, files=lines).status_code == 200
        modes = modes_below(home, home.parent / "tmp")
    finally:
        process.terminate()
        _, errors = process.communicate()
    modes |= modes_below(home, home.parent / "tmp")
    names = {path.name for path in modes}
    assert {"batches.db", "batches.db-wal", "files", "plans", "worker-0.sock", "gateway-0.sock"} <= names
    assert any(name.endswith(".tkrec") for name in names)
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & OTHERS} == {}
    assert errors == ""


def test_another_user_cannot_connect_to_a_workers_socket(open_directory):
    path = open_directory / "worker.sock"
    command = [sys.executable, "-m", "services.worker", f"worker_listen=unix:{path}", "device=cpu"]
    process = subprocess.Popen(command, umask=0, stderr=subprocess.PIPE, text=True)
    try:
        next(line for line in process.stderr if "listening" in line)
        assert stat.S_IMODE(path.stat().st_mode) & OTHERS == 0
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(str(path))
        if os.geteuid() == 0:  # only root can become another user
            assert connected_as_nobody(path) == "Permission denied"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users may enter, also through those above it."""
    with tempfile.TemporaryDirectory(prefix="toka-test-") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def connected_as_nobody(path: Path) -> str:
    """Connect to a unix socket as another user. Returns the error, or an empty string."""
    done = subprocess.run([sys.executable, "-c", CONNECT, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()
