"""The execution of faults."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from bench.chaos.cluster import Cluster
from bench.chaos.network import Link
from bench.chaos.recovery import Recoveries
from bench.chaos.schedule import Fault
from bench.chaos.weather import Weather

_LOOK_S = 0.05
_LATE_S = 60.0  # time that a service may take to terminate, including drain_seconds


class Storm:
    """The runner of faults, on the program's event loop. A target has one fault at a time; others wait."""

    def __init__(self, cluster: Cluster, weather: Weather, recoveries: Recoveries) -> None:
        self._cluster, self._weather, self._recoveries = cluster, weather, recoveries
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.struck: Counter[str] = Counter()  # faults so far, by kind
        self.late: list[str] = []  # services that had to be killed because they did not end

    async def rage(self, faults: Sequence[Fault]) -> None:
        """Run all faults at their times, and wait until the last one is over."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as strikes:
            for fault in faults:
                strikes.create_task(self._at(begin + fault.at, fault))

    async def _at(self, moment: float, fault: Fault) -> None:
        await asyncio.sleep(moment - time.monotonic())
        async with contextlib.AsyncExitStack() as turns:
            for name in sorted(fault.targets) if fault.how != "partition" else ["-".join(fault.targets)]:
                await turns.enter_async_context(self._turns[name])
            if fault.how != "partition":
                await self._all_run(fault.targets)
            await self._strike(fault)

    async def _strike(self, fault: Fault) -> None:
        trouble = self._weather.strikes(fault.kind, fault.targets)
        self._recoveries.begin(fault.kind, next((name for name in fault.targets if name in self._cluster.urls), None))
        self.struck[fault.kind] += 1
        match fault.how:
            case "kill":
                for name in fault.targets:
                    self._kill(name)
            case "term":
                await self._terminate(fault.targets[0])
            case "stop":
                await self._stop(fault.targets[0], fault.seconds)
            case "partition":
                await self._part(Link(*fault.targets), fault.seconds)
        if fault.how != "partition":
            await self._all_run(fault.targets)
            for name in self._cluster.urls.keys() & set(fault.targets):
                await self._cluster.answers(name)
        trouble.end = time.monotonic()

    def _kill(self, name: str) -> None:
        self._cluster.expect_end(name)
        self._cluster.processes[name].kill()

    async def _terminate(self, name: str) -> None:
        process, give_up_at = self._cluster.processes[name], time.monotonic() + _LATE_S
        pid = process.pid
        self._cluster.expect_end(name, _LATE_S + 1)
        process.signal(signal.SIGTERM)
        while process.pid == pid and process.running:
            if time.monotonic() > give_up_at:
                self.late.append(f"{name} {_LATE_S:.0f} s after SIGTERM")
                self._kill(name)
                return
            await asyncio.sleep(_LOOK_S)

    async def _stop(self, name: str, seconds: float) -> None:
        """Stop the process for ``seconds``. Its watchdog may end it during this time or later."""
        pid = self._cluster.processes[name].pid
        self._cluster.expect_end(name, seconds + 60)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if self._cluster.processes[name].pid == pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _part(self, link: Link, seconds: float) -> None:
        self._cluster.network.cut(link)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._cluster.network.heal(link)

    async def _all_run(self, names: Sequence[str]) -> None:
        for name in names:
            await self._cluster.runs(name)
