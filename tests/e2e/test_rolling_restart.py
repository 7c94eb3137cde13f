"""Every service is restarted in turn, under load, and no request is lost."""

import asyncio
import contextlib
import itertools
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.server import free_port
from tests.gateway.deployment import PATIENCE_S, Process, eventually_async, stop_and_wait

pytestmark = pytest.mark.slow

CLIENTS = 8
PROMPTS = [f"This is number {number}" for number in range(5)]


class Cluster:
    """Two gateways on ports of their own, two schedulers, and a fake worker for each."""

    def __init__(self, directory: Path) -> None:
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        schedulers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.services: list[Process] = []
        for index, worker in enumerate(workers):
            log = directory / f"worker-{index}.log"
            self.services.append(Process(log, "tests.fakes.worker", listen=worker, step_ms=3))
        for index, (scheduler, worker) in enumerate(zip(schedulers, workers, strict=True)):
            flags = {"scheduler_listen": scheduler, "worker_addresses": worker}
            self.services.append(Process(directory / f"scheduler-{index}.log", "services.scheduler", **flags))
        for index, url in enumerate(self.urls):
            flags = {"port": url.rpartition(":")[2], "scheduler_addresses": ",".join(schedulers), "store_url": "none"}
            self.services.append(Process(directory / f"gateway-{index}.log", "services.gateway", **flags))

    def whole(self) -> bool:
        """Both gateways know that both replicas are ready."""
        try:
            texts = [httpx.get(url + "/metrics", timeout=PATIENCE_S).text for url in self.urls]
        except httpx.TransportError:
            return False
        families = [family for text in texts for family in text_string_to_metric_families(text)]
        return [s.value for family in families for s in family.samples if s.name == "toka_replica_ready"] == [1.0] * 4


class Load:
    """Clients that ask again and again, and compare each answer with the one that is known."""

    def __init__(self, urls: list[str]) -> None:
        settings = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
        self._sdks = [openai.AsyncOpenAI(base_url=url + "/v1", **settings) for url in urls]
        self._known: dict[str, str] = {}
        self.answers = 0
        self.retries = 0
        self.lost: list[str] = []

    async def aclose(self) -> None:
        for sdk in self._sdks:
            await sdk.close()

    async def learn(self) -> None:
        self._model = (await self._sdks[0].models.list()).data[0].id
        for prompt in PROMPTS:
            self._known[prompt] = await self._ask(0, prompt, stream=False)

    async def run(self, client: int) -> None:
        for turn in itertools.count(client):
            prompt = PROMPTS[turn % len(PROMPTS)]
            try:
                answer = await self._ask_one_of_them(turn, prompt)
            except (openai.APIError, httpx.TransportError) as error:  # the latter in the middle of a stream
                answer = repr(error)
            if answer == self._known[prompt]:
                self.answers += 1
            else:
                self.lost.append(answer)

    async def _ask_one_of_them(self, turn: int, prompt: str) -> str:
        """A gateway that takes no connections is passed by."""
        while True:
            try:
                return await self._ask(turn % 2, prompt, stream=bool(turn // 2 % 2))
            except openai.APIConnectionError:
                self.retries += 1
                turn += 1

    async def _ask(self, gateway: int, prompt: str, *, stream: bool) -> str:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 80, "seed": 1, "extra_body": {"ignore_eos": True}}
        if not stream:
            return (await self._sdks[gateway].completions.create(**body)).choices[0].text
        chunks = await self._sdks[gateway].completions.create(stream=True, **body)
        return "".join([chunk.choices[0].text async for chunk in chunks])


@pytest.fixture
def cluster(tmp_path):
    running = Cluster(tmp_path)
    yield running
    for service in reversed(running.services):
        service.stop()


async def test_a_rolling_restart_loses_no_request(cluster):
    await eventually_async(cluster.whole)
    async with contextlib.aclosing(Load(cluster.urls)) as load:
        await load.learn()
        clients = [asyncio.create_task(load.run(index)) for index in range(CLIENTS)]
        for service in cluster.services:
            answered = load.answers
            await eventually_async(lambda goal=answered + CLIENTS: load.answers >= goal)
            assert await asyncio.to_thread(stop_and_wait, service) == 0
            service.start()
            await eventually_async(cluster.whole)
        assert load.lost == []
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert load.retries > 0  # gateways were away
