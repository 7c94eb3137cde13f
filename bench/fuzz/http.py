"""The fuzzer of HTTP: many connections, each with one request after the other."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from bench.fuzz.asks import Ask, Asks
from bench.fuzz.canary import marks
from bench.fuzz.config import FuzzConfig
from bench.fuzz.connection import Connection
from bench.fuzz.credentials import Credentials
from bench.fuzz.expected import Expected
from bench.fuzz.findings import Findings, Wrong
from bench.fuzz.judge import Judge
from bench.fuzz.kept import Kept
from bench.fuzz.schema import Api
from services.gateway.app.routes import OPERATOR_ROUTERS

_OF_OPERATORS = frozenset(route.path for router in OPERATOR_ROUTERS for route in router.routes)


class HttpFuzzer:
    """A fuzzer of one gateway."""

    def __init__(
        self,
        config: FuzzConfig,
        url: str,
        credentials: Credentials,
        findings: Findings,
        expected: Expected | None = None,
    ) -> None:
        self._config, self._url, self._findings = config, httpx.URL(url), findings
        described = httpx.get(
            f"{url}/openapi.json", headers={"authorization": credentials.of("team-a")}, trust_env=False
        )
        kept = Kept()
        self._kept = kept
        # Without keys, every client is an operator. A pause, or an abort of all requests, would stop valid requests.
        left_out = () if config.keys else _OF_OPERATORS
        self._asks = Asks(config.seed, Api(described.json(), left_out), kept, credentials)
        self._judge = Judge(expected or Expected(), kept)
        self._statuses: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._slowest = 0.0

    async def run(self, count: int) -> dict[str, Any]:
        """Send ``count`` requests. Return the number of requests by kind and by status."""
        began = time.monotonic()
        numbers = iter(range(self._config.first, self._config.first + count))
        async with asyncio.TaskGroup() as clients:
            for _ in range(min(count, self._config.concurrency)):
                clients.create_task(self._client(numbers))
        seconds = time.monotonic() - began
        return {
            "requests": count,
            "seconds": round(seconds, 1),
            "requests_per_second": round(count / seconds),
            "slowest_seconds": round(self._slowest, 2),
            "kinds": dict(sorted(self._kinds.items())),
            "statuses": {str(status): times for status, times in sorted(self._statuses.items())},
        }

    async def _client(self, numbers: Iterator[int]) -> None:
        connection: Connection | None = None
        for number in numbers:
            ask = self._asks.make(number)
            self._kinds[ask.kind] += 1
            if ask.owner is not None and ask.path.startswith(("/v1/files", "/v1/responses")):
                self._kept.sent(marks(ask.data), ask.owner)
            connection = await self._send(ask, connection)
        if connection is not None:
            connection.close()

    async def _send(self, ask: Ask, connection: Connection | None) -> Connection | None:
        """Send ``ask`` over ``connection``, or over a new connection if it is closed. Return the used connection."""
        began, answer = time.monotonic(), b""
        try:
            while True:
                fresh = connection is None or connection.closed
                if fresh:
                    connection = await Connection.of(self._url.host, self._url.port or 80)
                reply = await connection.exchange(ask, self._config.answer_seconds)
                answer = reply.raw
                if fresh or reply.status or ask.leaves_after is not None:
                    break  # otherwise the server may have closed an idle connection, so try a new one
            self._statuses[reply.status] += 1
            if not ask.stops:
                self._slowest = max(self._slowest, time.monotonic() - began)
            self._judge.look(ask, reply)
        except Wrong as wrong:
            self._findings.add("http", ask.number, wrong.kind, str(wrong), ask.data, answer)
        except TimeoutError:
            self._findings.add("http", ask.number, "late", "no answer in time", ask.data)
        except OSError as error:
            self._findings.add("http", ask.number, "lost", f"no connection: {error}", ask.data)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            self._findings.add(
                "http", ask.number, "shape", f"an answer that cannot be read: {error!r}", ask.data, answer
            )
        return connection
