"""Every link by mTLS, and every caller known: the three services as processes of their own."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from bench.server import free_port
from services.common.keys import hash_of, new_key
from services.common.rpc.channel import Dialer
from services.common.rpc.probe import probe
from services.common.rpc.token import make_token_file
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.session import Timings
from tests.common.rpc.authority import Authority, flags, links
from tests.gateway.deployment import Process, eventually, eventually_async

pytestmark = pytest.mark.slow

KEY = new_key()


class Services:
    """One of each. ``dialer`` shows a certificate that they take."""

    def __init__(self, directory: Path) -> None:
        self.worker_address, self.scheduler_address, gateway = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self.url = f"http://{gateway}"
        self.authority = Authority(directory)
        self.dialer = Dialer.of(links(self.authority, self.authority.issue("client")))
        (keys := directory / "keys.toml").write_text(f'[[keys]]\nname = "team"\nhash = "{hash_of(KEY)}"\n')
        make_token_file(token := directory / "token")

        def start(service: str, **given) -> Process:
            shown = flags(self.authority, self.authority.issue(service))
            return Process(directory / f"{service}.log", f"services.{service}", **shown, **given)

        known = {"api_keys_file": keys, "grpc_token_file": token}
        at, store = self.scheduler_address, directory / "store"
        self.processes = [
            start("worker", worker_listen=self.worker_address, device="cpu", dtype="float32"),
            start("scheduler", scheduler_listen=at, worker_addresses=self.worker_address, **known),
            start("gateway", port=gateway.rpartition(":")[2], scheduler_addresses=at, store_dir=store, **known),
        ]

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.stop()


@pytest.fixture(scope="module")
def services(tmp_path_factory) -> Iterator[Services]:
    services = Services(tmp_path_factory.mktemp("mtls"))
    yield services
    services.stop()


def test_a_request_goes_through_all_three(services: Services):
    for address in (services.worker_address, services.scheduler_address):
        eventually(lambda at=address: probe(at, services.dialer) == "SERVING")
    with openai.OpenAI(base_url=f"{services.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        eventually(lambda: answers(client))
        answer = client.chat.completions.create(
            model="tokasaurus-builtin", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, temperature=0
        )
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].message.content


def answers(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.OpenAIError:
        return False


async def test_nobody_else_gets_in(services: Services):
    for address in (services.worker_address, services.scheduler_address):
        await eventually_async(lambda at=address: probe(at, services.dialer) == "SERVING")
        assert probe(address).startswith("UNAVAILABLE")
        assert probe(address, Dialer.of(links(services.authority))).startswith("UNAVAILABLE")
    await until_in_trouble(services, Dialer(), "failed to connect")  # a gateway that shows nothing
    await until_in_trouble(services, services.dialer, "this server wants an API key")  # one without the token


async def until_in_trouble(services: Services, dialer: Dialer, reason: str) -> None:
    fleet = Fleet(
        [services.scheduler_address],
        tokenizer_fingerprint="",
        metrics=RequestMetrics(),
        timings=Timings(),
        dialer=dialer,
    )
    fleet.start()
    try:
        while reason not in fleet.trouble:
            assert fleet.replicas[0].model is None
            await asyncio.sleep(0.01)
    finally:
        await fleet.stop()
