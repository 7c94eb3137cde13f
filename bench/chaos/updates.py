"""Verify answers while weights are replaced and services are killed: ``python -m bench.chaos.updates [updates=50]``.

Runs two gateways, two schedulers and two fake workers, whose tokens depend on the weights. Each client sends one
request after the other. Meanwhile the weights are replaced, with several kinds of pauses. During some updates a service
is killed and started again. An update that fails is repeated until it succeeds.

The tokens of each span must be those that the weights of its version generate. Tokens without a span are of a sample
that continued at another scheduler. Each of them must be the token of some version, and these versions must ascend.
After an update that failed, each scheduler must have the last version or that of the update. After an update that
succeeded, each scheduler must have its version and must resume.

The last line is one JSON object. Exit status 1 if a request was lost or wrong or hung, if a version was wrong, if
a service crashed, or if a worker found a plan that broke the contract.
"""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from bench.chaos.cluster import FAKE_SIZES, Cluster, cluster
from bench.chaos.config import ClusterConfig
from bench.chaos.metrics import left_paused
from bench.server import run_kept
from services.common.config import from_command_line
from services.common.flags import Float, Int
from tests.fakes.model import FakeShape, continuation

_SHAPE = FakeShape(**FAKE_SIZES)
_PROMPT = list(range(50, 90))
_RETRY_S = 0.2
_UPDATE_S = 120.0  # time in which an update must succeed after a kill
_BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "n": 1, "max_tokens": 200},
    {"temperature": 1.0, "n": 4, "max_tokens": 60},
    {"temperature": 1.0, "n": 2, "max_tokens": 10},
)
_MODES: tuple[tuple[dict[str, Any] | None, dict[str, Any]], ...] = (
    (None, {}),
    (None, {"abort_all_requests": True}),
    ({"mode": "in_place"}, {}),
    ({"mode": "retract"}, {}),
)  # the pause before the update, and the fields of the update


class UpdatesConfig(ClusterConfig):
    """The flags."""

    worker: str = Field("fake", pattern="^fake$", description="only the fake worker's tokens show their weights")
    updates: Int = Field(50, ge=1)
    streams: Int = Field(200, ge=1, description="clients, each of which sends one request after the other")
    kills: Float = Field(0.5, ge=0, le=1, description="share of updates during which a service is killed")
    between_seconds: Float = Field(0.5, ge=0, description="time between two updates")
    hang_seconds: Float = Field(180.0, gt=0, description="time after which a request counts as hanging")
    seed: Int = Field(1)


class Wrong(Exception):
    """A request that hung, or whose answer is not the expected one."""


def check_choice(body: dict[str, Any], choice: dict[str, Any], latest: int) -> list[tuple[int, int]]:
    """Return the version and the number of tokens of each span of ``choice``, which answers ``body``.

    Raises ``Wrong`` for a wrong end, and for a token that the weights of its version do not generate. Tokens without a
    span come first. Their versions ascend and are at most ``latest``.
    """
    tokens, reason = choice["token_ids"], choice["finish_reason"]
    if reason not in ("length", "abort") or (reason == "length") != (len(tokens) == body["max_tokens"]):
        raise Wrong(f"{len(tokens)} tokens end with {reason}")
    spans = [(int(span["version"] or 0), span["tokens"]) for span in choice.get("weights", [])]
    end, version = len(tokens) - sum(count for _, count in spans), 0
    for at in range(end):
        later = range(version, latest + 1)
        found = next((each for each in later if _expected(body, choice, at, 1, each) == tokens[at : at + 1]), None)
        if found is None:
            raise Wrong(f"token {at} is of no version from {version} to {latest}")
        version = found
    at = end
    for number, count in spans:
        if number < version:
            raise Wrong(f"version {number} after {version}: {spans}")
        if tokens[at : at + count] != _expected(body, choice, at, count, number):
            raise Wrong(f"tokens {at} to {at + count} are not of version {number}: {spans}")
        at, version = at + count, number
    return spans


def _expected(body: dict[str, Any], choice: dict[str, Any], at: int, count: int, version: int) -> list[int]:
    """Return the tokens ``at`` to ``at + count`` that the weights ``version`` generate after the tokens before."""
    return continuation(
        _SHAPE, [*body["prompt"], *choice["token_ids"][:at]], count, temperature=body["temperature"],
        seed=body["seed"], sample_index=choice["index"], weights=version,
    )  # fmt: skip


class Updates:
    """The load and the updates, on the program's event loop."""

    def __init__(self, config: UpdatesConfig, running: Cluster) -> None:
        self._config, self._cluster = config, running
        self._random = random.Random(config.seed)
        self._version = 0  # of the last update that succeeded
        self._over = False
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=self._config.hang_seconds, limits=limits) as http,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(self._config.streams):
                clients.create_task(self._client(http, number))
            for number in range(1, self._config.updates + 1):
                await asyncio.sleep(self._config.between_seconds)
                await self._update(http, number)
            self._over = True

    # -- the load

    async def _client(self, http: httpx.AsyncClient, client: int) -> None:
        count = 0
        while not self._over:
            count += 1
            seed = client * 100_000 + count
            body = {"prompt": _PROMPT, "seed": seed, "ignore_eos": True, "return_token_ids": True}
            body |= _BODIES[(client + count) % len(_BODIES)]
            try:
                await self._request(http, body)
            except Wrong as wrong:
                self.counts["wrong"] += 1
                self.problems.append(f"seed {body['seed']}: {wrong}")

    async def _request(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Send ``body`` until a gateway answers, and check the answer. Raises ``Wrong``."""
        asked = time.monotonic()
        while True:
            if time.monotonic() > asked + self._config.hang_seconds:
                raise Wrong("hangs")
            url = self._random.choice(list(self._cluster.urls.values()))
            try:
                response = await http.post(f"{url}/v1/completions", json=body)
            except httpx.TimeoutException:
                raise Wrong("hangs") from None
            except httpx.TransportError:
                self.counts["retries"] += 1
                await asyncio.sleep(_RETRY_S)
                continue
            if response.status_code == httpx.codes.OK:
                break
            if "shutting down" not in response.text and "no scheduler" not in response.text:
                raise Wrong(f"{response.status_code}: {response.text[:300]}")
            await asyncio.sleep(_RETRY_S)
        self.counts["requests"] += 1
        choices = response.json()["choices"]
        if len(choices) != body["n"]:
            raise Wrong(f"{len(choices)} choices")
        for choice in choices:
            self._check(body, choice)

    def _check(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        spans = check_choice(body, choice, self._version + 1)
        self.counts["tokens"] += len(choice["token_ids"])
        self.counts["spans"] += len(spans)
        self.counts["tokens without a span"] += len(choice["token_ids"]) - sum(count for _, count in spans)
        self.counts[f"ended by {choice['finish_reason']}"] += 1

    # -- the updates

    async def _update(self, http: httpx.AsyncClient, number: int) -> None:
        """Replace the weights by version ``number``. Repeat a failed update until one succeeds."""
        victim = self._random.choice(list(self._cluster.processes))
        killing = None
        if self._random.random() < self._config.kills:
            killing = asyncio.create_task(self._kill(victim, self._random.random() * 0.4))
        deadline = time.monotonic() + _UPDATE_S
        while not await self._try_update(http, number):
            self.counts["failed updates"] += 1
            if time.monotonic() > deadline:
                self.problems.append(f"update {number} did not succeed in {_UPDATE_S} s")
                return
            await self._check_versions(http, {self._version, number})
            await asyncio.sleep(_RETRY_S)
        self._version = number
        self.counts["updates"] += 1
        if killing is not None:
            await killing
            await self._cluster.wait_ready()
        await self._check_versions(http, {number})
        if killing is not None and (paused := await left_paused(self._cluster)):
            self.problems.append(f"after update {number}: {paused} schedulers stay paused")

    async def _try_update(self, http: httpx.AsyncClient, number: int) -> bool:
        """Replace the weights, and return True if that succeeded."""
        url = self._random.choice(list(self._cluster.urls.values()))
        pause, fields = _MODES[number % len(_MODES)]
        body = {"model_path": f"/weights/{number}", "weight_version": str(number)} | fields
        try:
            if pause is not None:
                (await http.post(f"{url}/pause_generation", json=pause)).raise_for_status()
            response = await http.post(f"{url}/update_weights_from_disk", json=body)
            if pause is not None:
                (await http.post(f"{url}/continue_generation", json={})).raise_for_status()
        except (httpx.TransportError, httpx.HTTPStatusError):
            return False
        return response.status_code == httpx.codes.OK

    async def _kill(self, name: str, after_s: float) -> None:
        """Kill a service after ``after_s`` seconds, and wait until it runs again."""
        await asyncio.sleep(after_s)
        self.counts[f"killed {name.partition('-')[0]}s"] += 1
        self._cluster.expect_end(name)
        self._cluster.processes[name].kill()
        await self._cluster.runs(name)

    async def _check_versions(self, http: httpx.AsyncClient, versions: set[int]) -> None:
        """Add a problem if a scheduler has a version that is not in ``versions``."""
        for url in self._cluster.urls.values():
            try:
                schedulers = (await http.get(f"{url}/weights")).raise_for_status().json()["schedulers"]
            except (httpx.TransportError, httpx.HTTPStatusError):
                continue
            found = {int(each["version"] or 0) for each in schedulers}
            if not found <= versions:
                self.problems.append(f"after update {max(versions)}: versions {found} instead of {versions}")


def measure(config: UpdatesConfig, directory: Path) -> dict[str, Any]:
    return asyncio.run(_measure(config, directory))


async def _measure(config: UpdatesConfig, directory: Path) -> dict[str, Any]:
    with cluster(config, directory) as (running, _):
        keeping = asyncio.create_task(running.keep())
        try:
            await running.wait_ready()
            updates = Updates(config, running)
            began = time.monotonic()
            await updates.run()
            seconds = time.monotonic() - began
        finally:
            keeping.cancel()
    figures: dict[str, Any] = {"seconds": round(seconds, 1), "streams": config.streams, "seed": config.seed}
    figures |= dict(sorted(updates.counts.items())) | {"problems": updates.problems[:20]}
    return figures | {"crashes": dict(running.crashes), "violations": running.violations()}


def draw(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        print(f"{name}: {value}")


def is_right(figures: dict[str, Any]) -> bool:
    return not any(figures[name] for name in ("problems", "crashes", "violations"))


def main() -> None:
    config = from_command_line(UpdatesConfig)
    run_kept("updates", config.directory, lambda directory: measure(config, directory), draw, is_right)


if __name__ == "__main__":
    main()
