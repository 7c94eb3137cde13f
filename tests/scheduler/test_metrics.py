"""What a scheduler tells Prometheus and statsd of itself: the figures that its gateways show."""

import asyncio
import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common.config import SchedulerConfig
from services.common.errors import Unavailable
from services.common.metrics.server import serve_on
from services.common.process.handover import listen
from services.scheduler.api.metrics import public_address
from services.scheduler.engine.statsd import Statsd
from tests.scheduler.service import PROMPT, session, start
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2

PATIENCE_S = 60


async def scraped(address: str) -> dict[tuple[str, ...], float]:
    """By name, and stage or steps."""
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
        text = (await client.get(f"http://{address}/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name in ("stage", "steps"))): sample.value
        for sample in samples
    }


async def test_a_scheduler_tells_its_load_its_forecast_and_where_its_time_goes():
    async with start() as service, serve_on(listen("127.0.0.1", 0)[0], [service.server.metrics()]) as address:
        request = {"tokens": {"token_ids": PROMPT}, "sampling": generate_pb2.Sampling(temperature=0)}
        stopping = {"max_tokens": 40, "ignore_eos": True}
        tokens = (await service.generate(**request, stopping=generate_pb2.Stopping(**stopping)))[0].tokens
        end = next(index for index in range(5, 40) if tokens[index] not in tokens[:index])
        stopping["token_ids"] = [tokens[end]]  # nobody knows that it comes
        service.worker.hold()
        again = asyncio.create_task(service.generate(**request, stopping=generate_pb2.Stopping(**stopping)))
        for answered in range(end + 1):
            await service.worker.received(len(tokens) + answered + 2)
            service.worker.release(1)
        service.worker.release()
        assert (await again)[0].tokens == tokens[: end + 1]
        await service.until_load(lambda load: not load.plans_in_flight)
        figures = await scraped(address)
        load = await service.load()
        delivered = len(tokens) + end + 1
        assert figures["toka_generation_tokens_total",] == figures["vllm:generation_tokens_total",] == delivered
        assert figures["vllm:prompt_tokens_total",] == 2 * len(PROMPT)
        for name in ("vllm:iteration_tokens_total", "toka_iteration_tokens"):
            assert figures[f"{name}_count",] == figures["toka_steps_total",]
            assert figures[f"{name}_sum",] == figures["toka_step_tokens_total",] >= len(PROMPT) + delivered - 1
        assert figures["toka_steps_total",] == load.counters.steps > delivered
        assert figures["toka_plans_ahead",] == load.plans_ahead >= 2
        assert figures["toka_step_seconds",] > 0
        assert 0 < figures["toka_wasted_steps_total",] == figures["toka_wasted_tokens_total",]  # nobody else ran
        stages = {name[1]: value for name, value in figures.items() if name[0] == "toka_step_loop_seconds_total"}
        assert set(stages) == {"wait", "take", "plan", "send", "report", "deliver"}
        assert all(stages.values())
        pages = {name[1] for name in figures if name[0] == "toka_forecast_kv_pages"}
        assert pages == {"1", "10", "100", "1000"}


async def test_the_forecast_falls_to_nothing_behind_what_runs():
    async with start() as service, session(service) as client:
        assert list((await service.load()).forecast.pages) == [0] * 4  # as soon as there is a worker
        service.worker.hold()
        stopping = generate_pb2.Stopping(max_tokens=300, ignore_eos=True)
        guaranteed = generate_pb2.ADMISSION_MODE_GUARANTEED
        await client.submit(1, tokens={"token_ids": PROMPT}, stopping=stopping, admission=guaranteed)
        load = await service.until_load(lambda load: any(load.forecast.pages))
        expected = dict(zip(load.forecast.steps, load.forecast.pages, strict=True))
        assert list(expected) == [1, 10, 100, 1000]
        most = -(-(len(PROMPT) + 300) // load.page_size)
        assert load.in_use_pages <= expected[1] <= expected[10] <= expected[100] < most
        assert expected[1000] == 0
        service.worker.release()
        await client.finished(1)
        await service.until_load(lambda load: not any(load.forecast.pages))


async def test_of_the_prompt_tokens_that_were_looked_up_no_more_than_all_are_hits():
    async with start() as service, serve_on(listen("127.0.0.1", 0)[0], [service.server.metrics()]) as address:
        await service.generate(tokens={"token_ids": PROMPT}, n=4, stopping=generate_pb2.Stopping(max_tokens=3))
        figures = await scraped(address)
    assert figures["vllm:prompt_tokens_total",] == len(PROMPT)
    assert figures["vllm:prefix_cache_queries_total",] == 4 * len(PROMPT)  # each sample's
    assert figures["vllm:prefix_cache_hits_total",] >= 3 * (len(PROMPT) - 1)
    assert figures["vllm:prefix_cache_hits_total",] <= figures["vllm:prefix_cache_queries_total",]


async def test_statsd_is_told_gauges_and_what_was_added_to_counters():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(PATIENCE_S)
        url = f"127.0.0.1:{server.getsockname()[1]}"
        told: dict[str, list[str]] = {}

        def hear() -> None:
            datagram = server.recv(65536)
            assert len(datagram) <= 1432
            for line in datagram.decode().split("\n"):
                name, _, value = line.partition(":")
                told.setdefault(name, []).append(value)

        async with start(statsd_server_url=url, statsd_prefix="us", stats_report_seconds=0.05) as service:
            for _ in range(2):
                await service.generate(
                    tokens={"token_ids": PROMPT}, stopping=generate_pb2.Stopping(max_tokens=40, ignore_eos=True)
                )
            last = ("us.running_sequences", "us.forecast_pages.1000")
            while added(told, "us.sequences_finished") < 2 or any(told.get(name, [""])[-1] != "0|g" for name in last):
                await asyncio.to_thread(hear)
        assert added(told, "us.generated_tokens") == 80
        assert added(told, "us.prompt_tokens") == 2 * len(PROMPT)
        assert told["us.total_pages"][-1] == "1024|g"
        assert all(name.startswith("us.") for name in told)


def added(told: dict[str, list[str]], name: str) -> int:
    return sum(int(value.removesuffix("|c")) for value in told.get(name, []))


def test_a_statsd_server_that_is_not_there_costs_nothing_and_one_without_address_is_named():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        url = f"udp://127.0.0.1:{gone.getsockname()[1]}"
    statsd = Statsd(url, "tokasaurus")
    for _ in range(3):
        statsd.send(observe_pb2.Load())
    statsd.close()
    with pytest.raises(Unavailable, match="statsd_server_url"):
        Statsd("no-such-host.invalid:8125", "tokasaurus")
    with pytest.raises(ValueError, match="stats_report_seconds=0"):
        SchedulerConfig(statsd_server_url="127.0.0.1:8125", stats_report_seconds=0)


def test_a_replica_is_named_by_where_it_is_reached():
    assert public_address("127.0.0.1:10310") == "127.0.0.1:10310"
    assert public_address("0.0.0.0:10310") == f"{socket.gethostname()}:10310"
    assert public_address("unix:/run/scheduler.sock") == "unix:/run/scheduler.sock"
