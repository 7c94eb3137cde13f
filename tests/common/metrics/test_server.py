"""The page of a service that speaks no HTTP otherwise, and those who ask it the wrong way."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from bench.server import free_port
from services.common.config import SchedulerConfig
from services.common.errors import Unavailable
from services.common.metrics.server import serve_metrics, serve_on
from services.common.process.handover import listen


class One:
    def collect(self):
        yield GaugeMetricFamily("toka_test", "A test", value=7)


@asynccontextmanager
async def page():
    async with (
        serve_on(listen("127.0.0.1", 0)[0], [One()]) as address,
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=60) as client,
    ):
        client.address = address
        yield client


async def raw(address: str, sent: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        return await reader.read()
    except ConnectionResetError:  # it was closed without having been read
        return b""
    finally:
        writer.close()


async def test_it_tells_what_is_collected_and_facts_about_the_process():
    async with page() as client:
        answer = await client.get("/metrics?x=1")
        values = {family.name: family.samples for family in text_string_to_metric_families(answer.text)}
        assert values["toka_test"][0].value == 7
        assert values["process_resident_memory_bytes"][0].value > 0
        assert answer.headers["content-type"].startswith("text/plain")
        head = await client.head("/metrics")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 100


async def test_other_paths_methods_and_protocols_are_refused():
    async with page() as client:
        assert (await client.get("/")).status_code == 404
        refused = await client.post("/metrics")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await raw(client.address, b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        assert await raw(client.address, b"x" * 100_000) == b""
        assert (await client.get("/metrics")).status_code == 200


async def test_a_web_page_with_a_rebound_name_reads_nothing():
    config = SchedulerConfig(metrics_port=free_port(), allowed_hosts=("metrics.example.com",))
    async with serve_metrics(config, One()) as address, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for host, status in (
            (address, 200),
            ("localhost", 200),
            ("toka-schedulers:9400", 200),
            ("metrics.example.com", 200),
            ("evil.example", 403),
            ("EVIL.example:9400", 403),
        ):
            answer = await client.get(f"http://{address}/metrics", headers={"host": host})
            assert answer.status_code == status, host
        assert "allowed_hosts=" in answer.text
        two = await raw(address, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nHOST : evil.example\r\n\r\n")
        assert two.startswith(b"HTTP/1.1 403")


async def test_connections_are_bounded_and_those_that_leave_make_room():
    async with page() as client:
        host, _, port = client.address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(16)]
        assert await raw(client.address, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        for _, writer in idle[1:]:
            writer.close()
        while True:
            try:
                answer = await client.get("/metrics")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.01)
        assert answer.status_code == 200
    idle[0][1].close()


async def test_a_port_that_cannot_be_had_is_named_and_none_is_served_without_one():
    (taken,) = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with taken, pytest.raises(Unavailable, match="metrics_port"):
        async with serve_metrics(SchedulerConfig(metrics_port=port), One()):
            pass
    async with serve_metrics(SchedulerConfig(), One()) as address:
        assert address == ""
