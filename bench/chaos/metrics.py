"""Figures from the ``/metrics`` of the gateways."""

import asyncio
import time
from collections.abc import Collection

from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.cluster import Cluster

_EVERY_S = 1.0
_PATIENCE_S = 60.0  # longer than the limit of a pause whose gateway was killed
_SEQUENCES = ("toka_num_requests_running", "toka_num_requests_waiting")
_PAUSED = ("toka_paused",)
_FAILOVERS = ("toka_failovers_total",)


async def left_running(cluster: Cluster) -> int:
    """Return the sequences that still run after all clients have ended, such as those of a lost session.

    Waits some time for them to end.
    """
    return await _until_none(cluster, _SEQUENCES)


async def left_paused(cluster: Cluster) -> int:
    """Return the number of paused schedulers, after waiting up to 60 s for them to resume. -1: no answer."""
    return await _until_none(cluster, _PAUSED)


class Failovers:
    """The number of failovers of samples. It is read regularly, because a gateway that is killed loses its counts."""

    def __init__(self, cluster: Cluster) -> None:
        self.total = 0
        self._cluster = cluster
        self._last = dict.fromkeys(cluster.names["gateway"], (0, 0.0))  # pid, count

    async def watch(self) -> None:
        """Read the counts regularly, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(_EVERY_S)

    async def look(self) -> None:
        for gateway, (last_pid, last) in self._last.items():
            pid = self._cluster.processes[gateway].pid
            count = await _sum(self._cluster, gateway, _FAILOVERS)
            if count is not None:
                self.total += int(count - (last if pid == last_pid else 0))
                self._last[gateway] = (pid, count)


async def _until_none(cluster: Cluster, names: Collection[str]) -> int:
    """Return the sum of metrics when it is 0, or after 60 s. -1: the gateway does not answer."""
    gateway, give_up_at = cluster.names["gateway"][0], time.monotonic() + _PATIENCE_S
    while True:
        count = await _sum(cluster, gateway, names)
        if count == 0 or time.monotonic() > give_up_at:
            return -1 if count is None else int(count)
        await asyncio.sleep(_EVERY_S)


async def _sum(cluster: Cluster, gateway: str, names: Collection[str]) -> float | None:
    """Return the sum of metrics over their labels, or None if the gateway does not answer."""
    answer = await cluster.get(gateway, "/metrics")
    if answer is None:
        return None
    families = text_string_to_metric_families(answer.text)
    return sum(sample.value for family in families for sample in family.samples if sample.name in names)
