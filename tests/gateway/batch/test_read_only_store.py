"""A store that the gateway cannot write to."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.server import free_port
from tests.gateway.deployment import Deployment, Process, eventually

# Root writes everywhere, unless it is started without that capability.
WITHIN = ("setpriv", "--bounding-set", "-dac_override") if os.geteuid() == 0 else ()
LINES = {"file": ("a.jsonl", b"{}\n")}

pytestmark = pytest.mark.skipif(bool(WITHIN) and shutil.which("setpriv") is None, reason="root needs setpriv")


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("read_only")).wait_ready()
    yield made
    made.stop()


@pytest.fixture
def gateway(running, tmp_path) -> Iterator[tuple[httpx.Client, Process]]:
    """Another gateway, which obeys permissions, with a store of its own at ``tmp_path``."""
    port, store = free_port(), tmp_path / "store"
    flags = {"port": port, "scheduler_addresses": running.scheduler_address, "store_dir": store}
    (store / "files").mkdir(parents=True)
    process = Process(tmp_path / "gateway.log", "services.gateway", within=WITHIN, **flags)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        eventually(lambda: answers(client), 100)
        assert upload(client).status_code == 200
        yield client, process
    process.stop()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def upload(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"}, files=LINES)


def protect(store: Path, *, writable: bool) -> None:
    """Change the permissions of the owner."""
    for path in (store, *store.rglob("*")):
        path.chmod((0o700 if writable else 0o500) if path.is_dir() else (0o600 if writable else 0o400))


@pytest.mark.slow
def test_a_store_that_becomes_read_only_stops_uploads_alone(gateway, tmp_path):
    client, process = gateway
    protect(tmp_path / "store", writable=False)
    try:
        refused = upload(client)
        assert refused.status_code == 503
        assert "the store's files cannot be read or written" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
        assert len(client.get("/v1/files").json()["data"]) == 1
    finally:
        protect(tmp_path / "store", writable=True)
    assert upload(client).status_code == 200
    assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
def test_a_gateway_starts_with_a_read_only_store_and_says_so(gateway, tmp_path):
    client, process = gateway
    process.stop()
    written = len(process.log.read_text())
    protect(tmp_path / "store", writable=False)
    try:
        process.start()
        eventually(lambda: answers(client), 100)
        refused = client.get("/v1/files")
        assert refused.status_code == 503
        assert "nothing can be written to store_dir=" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
    finally:
        protect(tmp_path / "store", writable=True)
    eventually(lambda: upload(client).status_code == 200)
    log = process.log.read_text()[written:]
    assert '"store unavailable"' in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_read_only_database_is_named(gateway, tmp_path):
    client, process = gateway
    process.stop()
    written = len(process.log.read_text())
    database = tmp_path / "store" / "batches.db"
    database.chmod(0o400)
    process.start()
    eventually(lambda: answers(client), 100)
    refused = client.get("/v1/files")
    assert refused.status_code == 503
    assert "readonly database" in refused.json()["error"]["message"]
    protect(tmp_path / "store", writable=True)  # SQLite made its other files read-only, too
    eventually(lambda: upload(client).status_code == 200)
    assert "Traceback" not in process.log.read_text()[written:]
