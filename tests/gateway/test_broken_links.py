"""Links that stall, close halfway, lose or garble bytes for a second: every request ends, no answer is wrong, and the
link serves again. The same for longer: ``python -m bench.chaos.links``."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import grpc
import httpx
import numpy as np
import pytest

from bench.chaos.proxy import FAULTS, SILENT, Fault, Proxy
from services.common.config import SchedulerConfig
from services.common.errors import TokaError
from services.common.rpc.channel import PLAIN, Dialer
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.session import Timings
from services.scheduler.server import SchedulerServer
from services.scheduler.workers import heartbeat
from tests.common.rpc.authority import Authority, links
from tests.fakes.model import FakeShape, continuation
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import Deployment
from tokasaurus.common.v1.sampling_pb2 import Sampling
from tokasaurus.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

pytestmark = pytest.mark.slow

FAULT_S = 1.0
DEADLINE_S = 60.0  # of a request and of a start, on a machine with other work
READY_S = 30.0  # after the fault; gRPC's keepalive notices a broken connection after 40 s
TOKENS = 40
PROMPT = list(range(50, 90))
_seeds = count(1)

# One request: whether its answer is right, or None for an error.
Ask = Callable[[], Awaitable[bool | None]]


async def survives(ask: Ask, proxy: Proxy, fault: Fault, *, trusted: bool) -> None:
    """Ask before, during and after ``fault``. ``trusted``: no answer may be wrong, whatever the fault."""
    assert await ask()
    asked = []
    async with asyncio.timeout(DEADLINE_S), proxy.struck(fault, FAULT_S):
        over = asyncio.get_running_loop().time() + FAULT_S
        while (left_s := over - asyncio.get_running_loop().time()) > 0:
            asked.append(asyncio.create_task(ask()))
            await asyncio.wait(asked[-1:], timeout=min(left_s, 0.2))
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*asked)
    if trusted or fault not in SILENT:
        assert False not in answers, fault
    await until_right(ask, READY_S)


async def until_right(ask: Ask, seconds: float = DEADLINE_S) -> None:
    async with asyncio.timeout(seconds):
        while not await ask():  # noqa: ASYNC110  # an answer, not a flag of this process
            await asyncio.sleep(0.05)


@asynccontextmanager
async def proxied(target: str) -> AsyncIterator[dict[Fault, tuple[Proxy, str]]]:
    """A proxy, and its address, for each fault."""
    async with AsyncExitStack() as stack:
        proxies = {}
        for seed, fault in enumerate(FAULTS):
            proxy = Proxy(target, seed)
            proxies[fault] = proxy, await proxy.start()
            stack.push_async_callback(proxy.stop)
        yield proxies


def expected(seed: int) -> list[int]:
    return continuation(FakeShape(), PROMPT, TOKENS, seed=seed)


# -- gateway and scheduler


def asks_fleet(fleet: Fleet) -> Ask:
    async def ask() -> bool | None:
        seed = next(_seeds)
        settings = Settings(sampling=Sampling(temperature=1.0))
        job = PromptRequest(f"r-{seed}", "tokasaurus-builtin", np.array(PROMPT, np.uint32), TOKENS, seed, settings)
        try:
            generation = await fleet.generate([job], streaming=False)
            while await generation.wait_ended():
                pass
        except TokaError:
            return None
        return list(generation.samples[0].new_ids) == expected(seed)

    return ask


@asynccontextmanager
async def scheduler(step_s: float = 0.01, **given) -> AsyncIterator[str]:
    worker = FakeWorker(step_s=step_s)
    config = SchedulerConfig(worker_addresses=(await worker.start(),), scheduler_listen="127.0.0.1:0", **given)
    server = SchedulerServer(config)
    try:
        yield await server.start()
    finally:
        await server.stop()
        await worker.stop()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_session_survives_its_link(tmp_path, tls):
    authority = Authority(tmp_path)
    pair = authority.issue("scheduler")
    given = {"grpc_cert": str(pair.cert), "grpc_key": str(pair.key)} if tls else {}
    dialer = Dialer.of(links(authority)) if tls else PLAIN
    timings = Timings(open_timeout=2.0, heartbeat_interval=0.2, heartbeat_timeout=2.0, failover=30.0)
    fingerprint = Tokenizer.load("builtin").fingerprint
    async with scheduler(**given) as address, proxied(address) as proxies:
        fleets = {
            fault: Fleet(
                [at], tokenizer_fingerprint=fingerprint, metrics=RequestMetrics(), timings=timings, dialer=dialer
            )
            for fault, (_, at) in proxies.items()
        }
        for fleet in fleets.values():
            fleet.start()
        try:
            async with asyncio.TaskGroup() as trials:
                for fault, (proxy, _) in proxies.items():
                    trials.create_task(survives(asks_fleet(fleets[fault]), proxy, fault, trusted=tls))
        finally:
            for fleet in fleets.values():
                await fleet.stop()


# -- scheduler and worker


def asks_scheduler(channel: grpc.aio.Channel) -> Ask:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

    async def ask() -> bool | None:
        seed = next(_seeds)
        request = generate_pb2.GenerateRequest(
            tokens={"token_ids": PROMPT},
            sampling={"temperature": 1.0, "seed": seed},
            stopping={"max_tokens": TOKENS, "ignore_eos": True},
        )
        tokens: list[int] = []
        try:
            async for response in stub.Generate(request, wait_for_ready=True):
                for output in response.outputs.samples:
                    tokens += output.token_ids
                    if output.finish.reason == generate_pb2.FINISH_REASON_ERROR:
                        return None
        except grpc.aio.AioRpcError:
            return None
        return tokens == expected(seed)

    return ask


@asynccontextmanager
async def behind(proxy: Proxy, at: str) -> AsyncIterator[Ask]:
    """A scheduler whose worker is behind ``proxy``."""
    server = SchedulerServer(SchedulerConfig(worker_addresses=(at,), scheduler_listen="127.0.0.1:0"))
    async with PLAIN.open_aio(await server.start()) as channel:
        try:
            ask = asks_scheduler(channel)
            await until_right(ask)
            yield ask
        finally:
            await server.stop()


async def test_a_step_stream_survives_its_link(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.2)
    monkeypatch.setattr(heartbeat, "TIMEOUT_S", 1.0)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as trials:
        for seed, fault in enumerate(FAULTS):
            worker = FakeWorker(step_s=0.01)
            proxy = Proxy(await worker.start(), seed)
            stack.push_async_callback(worker.stop)
            ask = await stack.enter_async_context(behind(proxy, await proxy.start()))
            stack.push_async_callback(proxy.stop)
            trials.create_task(survives(ask, proxy, fault, trusted=False))


# -- client and gateway


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def test_a_client_survives_its_link(tmp_path, authority):
    pair = authority.issue("gateway")
    context = ssl.create_default_context(cafile=str(authority.cert))
    tls = {"http_cert": pair.cert, "http_key": pair.key}
    deployment = Deployment(tmp_path, worker={"step_ms": 10}, gateway=tls)
    try:
        async with proxied(deployment.url.removeprefix("http://")) as proxies, AsyncExitStack() as stack:
            asks = {
                fault: asks_http(await stack.enter_async_context(httpx.AsyncClient(verify=context, timeout=3)), at)
                for fault, (_, at) in proxies.items()
            }
            await until_right(asks["stall"])
            async with asyncio.TaskGroup() as trials:
                for fault, (proxy, _) in proxies.items():
                    trials.create_task(survives(asks[fault], proxy, fault, trusted=True))
    finally:
        deployment.stop()


def asks_http(http: httpx.AsyncClient, at: str) -> Ask:
    right = Tokenizer.load("builtin")

    async def ask() -> bool | None:
        seed = next(_seeds)
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed, "ignore_eos": True}
        try:
            response = await http.post(f"https://{at}/v1/completions", json=body | {"return_token_ids": True})
        except httpx.TransportError:
            return None
        if response.status_code != httpx.codes.OK:
            return None
        return response.json()["choices"][0]["text"] == right.decode(expected(seed))

    return ask
