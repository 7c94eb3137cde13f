"""A deployment that asks for keys."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from bench.server import free_port
from services.common.keys import hash_of, new_key
from tests.gateway.deployment import PATIENCE_S, Deployment

ENTRIES = {
    "team": "",
    "other": "",
    "boss": 'scopes = ["admin"]',
    "late": "expires = 2020-01-01",
    "one-at-once": "max_concurrent = 1",
    "two-at-once": "max_concurrent = 2",
    "thrifty": "tokens_per_minute = 300",
    "open": "tokens_per_minute = 1100",
    "trainer": "tokens_per_minute = 1100",
    "saver": "tokens_per_minute = 6000",
    "both": "max_concurrent = 1\ntokens_per_minute = 300",
}


class KeysFile:
    """The file, and the keys that it has the hashes of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = dict(ENTRIES)  # what else the file says of each, by name
        self.keys = {name: new_key() for name in ENTRIES}
        self.write(*ENTRIES)

    def write(self, *names: str) -> None:
        entry = '[[keys]]\nname = "{}"\nhash = "{}"\n{}\n'
        new = self.path.with_suffix(".new")
        new.write_text("".join(entry.format(name, hash_of(self.keys[name]), self.entries[name]) for name in names))
        new.rename(self.path)


@dataclass
class Guarded:
    """A deployment, its keys, and the port for operators."""

    running: Deployment
    keys: KeysFile
    admin_url: str

    def sdk(self, name: str) -> OpenAI:
        return OpenAI(
            base_url=self.running.url + "/v1", api_key=self.keys.keys[name], max_retries=0, timeout=PATIENCE_S
        )

    def http(self, name: str | None, **headers: str) -> httpx.Client:
        """``name``: whose key is sent; None: nobody's."""
        own = {} if name is None else {"authorization": f"Bearer {self.keys.keys[name]}"}
        return httpx.Client(base_url=self.running.url, headers=own | headers, timeout=PATIENCE_S)

    def metric(self, name: str) -> float:
        lines = httpx.get(self.admin_url + "/metrics", timeout=PATIENCE_S).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


def start(directory: Path, *, step_ms: int = 1, **gateway) -> Guarded:
    keys, port = KeysFile(directory / "keys.toml"), free_port()
    flags = {"api_keys_file": keys.path, "isolate_keys": "T", "admin_port": port} | gateway
    running = Deployment(directory, worker={"step_ms": step_ms}, gateway=flags)
    return Guarded(running.wait_ready(), keys, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="package")
def guarded(tmp_path_factory):
    made = start(tmp_path_factory.mktemp("guarded"))
    yield made
    made.running.stop()
