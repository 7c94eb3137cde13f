"""Children are watched, not what they started; ranks live and die together; and nothing of them stays behind."""

import asyncio
import signal
from collections.abc import Callable

import psutil
import pytest
from structlog.testing import capture_logs

from services.common.errors import Unavailable
from services.common.process.service import Stop
from services.launcher import supervisor
from services.launcher.deployment import ChildSpec
from services.launcher.supervisor import FIRST_PAUSE_S, Child, Unit, next_pause
from tests.gateway.deployment import eventually_async


class ForkingSpec(ChildSpec):
    """Its process starts another one, which inherits its stderr."""

    module = "tests.launcher.forking"


class WordySpec(ChildSpec):
    """Its process writes more into a line than fits one, another line, and ends."""

    module = "tests.launcher.wordy"


class EscapingSpec(ChildSpec):
    """Its process leaves one behind that is not of its group and has its stderr."""

    module = "tests.launcher.escaping"


class CountingSpec(ChildSpec):
    """Its process writes twenty lines, and ends."""

    module = "tests.launcher.counting"


class RankSpec(ChildSpec):
    module = "tests.launcher.rank"


@pytest.fixture
def lines() -> list[bytes]:
    """The lines that ``child`` has written to its stderr."""
    return []


@pytest.fixture
async def child(tmp_path, lines):
    def forward(line: bytes) -> None:
        lines.append(line)
        supervisor.write_line(line)

    child = Child(ForkingSpec("forking", "worker", f"unix:{tmp_path}/absent.sock", ()), forward=forward)
    yield child
    await child.stop()


@pytest.fixture
async def rank(tmp_path):
    """Makes the next rank of three, which has a manner (see ``rank.main``)."""
    ranks: list[Child] = []

    def make(manner: str = "") -> Child:
        address, number = f"unix:{tmp_path}/{len(ranks)}.sock", str(len(ranks))
        flags = (address, f"{tmp_path}/meeting", number, "3", manner)
        ranks.append(Child(RankSpec(f"rank-{number}", "worker", address, flags)))
        return ranks[-1]

    yield make
    await asyncio.gather(*(child.stop() for child in ranks))


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def started(lines: list[bytes]) -> psutil.Process:
    """The process that the child has started."""
    await eventually_async(lambda: lines)
    return psutil.Process(int(lines[0]))


async def all_ready(children: list[Child]) -> set[int]:
    """Their process ids."""
    for child in children:
        await asyncio.wait_for(child.ready.wait(), 30)
    return {child.process.pid for child in children}


async def ended(run: asyncio.Task) -> None:
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_a_dead_child_is_noticed_though_what_it_started_lives(child, lines):
    run = asyncio.create_task(Unit([child]).run())
    inner = await started(lines)
    child.process.kill()
    with pytest.raises(Unavailable, match="was killed by SIGKILL before it was ready"):
        await asyncio.wait_for(run, 30)
    await eventually_async(lambda: is_gone(inner))


async def test_a_line_that_does_not_end_holds_nobody_up(child, lines, tmp_path, capfd):
    child.spec = WordySpec("wordy", "worker", f"unix:{tmp_path}/absent.sock", ())
    child_exit = await asyncio.wait_for(child.run_once(), 30)
    assert child_exit.status == 7
    assert child_exit.last_lines[-1] == "the end"
    assert capfd.readouterr().err.count("x") == 4_000_000
    assert max(map(len, lines)) < 3_000_000  # in pieces


@pytest.mark.parametrize("status", [0, 3])
async def test_the_reason_of_a_failed_start_ends_with_the_last_lines(child, lines, tmp_path, status):
    child.spec = CountingSpec("counting", "worker", f"unix:{tmp_path}/absent.sock", (str(status),))
    with pytest.raises(Unavailable) as failed:
        await asyncio.wait_for(Unit([child]).run(), 30)
    first, *last = failed.value.message.splitlines()
    assert first == f"counting exited with status {status} before it was ready"
    assert last == [f"  line {number}" for number in range(12, 20)]
    assert lines == [b"line %d\n" % number for number in range(20)]


async def test_the_stderr_of_a_dead_child_is_closed_though_somebody_has_it(child, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_READ_S", 0.1)
    child.spec = EscapingSpec("escaping", "worker", f"unix:{tmp_path}/absent.sock", ())
    before = psutil.Process().num_fds()
    child_exit = await asyncio.wait_for(child.run_once(), 30)
    escaped = psutil.Process(int(child_exit.last_lines[0]))
    try:
        assert escaped.is_running()
        await eventually_async(lambda: psutil.Process().num_fds() <= before)
    finally:
        escaped.kill()


async def test_stopping_a_child_ends_what_it_started(child, lines):
    run = asyncio.create_task(Unit([child]).run())
    inner = await started(lines)
    await ended(run)
    await child.stop()
    assert child.process.returncode is not None
    await eventually_async(lambda: is_gone(inner))


async def test_ranks_are_started_again_together_and_counted_once(rank: Callable[..., Child]):
    ranks = [rank(), rank(), rank()]
    run = asyncio.create_task(Unit(ranks).run())
    before = await all_ready(ranks)
    with capture_logs() as logs:
        ranks[1].process.kill()
        await eventually_async(lambda: not any(child.ready.is_set() for child in ranks))
        assert before.isdisjoint(await all_ready(ranks))
    [told] = [line for line in logs if line["log_level"] == "error"]
    assert (told["reason"], told["peers"]) == ("rank-1 was killed by SIGKILL", ["rank-0", "rank-2"])
    assert told["in_s"] == 0.2
    await ended(run)


async def test_the_reason_is_a_ranks_own_though_its_peers_end_before_it(rank: Callable[..., Child]):
    run = asyncio.create_task(Unit([rank(), rank("broken"), rank()]).run())
    with pytest.raises(Unavailable, match="rank-1 exited with status 1 before it was ready\n  there is no such"):
        await asyncio.wait_for(run, 30)


async def test_a_rank_that_does_not_notice_the_end_of_its_peers_is_ended(rank: Callable[..., Child]):
    ranks = [rank(), rank(), rank("deaf")]
    run = asyncio.create_task(Unit(ranks, peer_grace_s=0.2).run())
    before = await all_ready(ranks)
    ranks[0].process.kill()
    await eventually_async(lambda: not any(child.ready.is_set() for child in ranks))
    assert before.isdisjoint(await all_ready(ranks))
    await ended(run)


async def test_who_has_served_once_is_started_again_however_often_it_dies_before_it_is_ready(rank, monkeypatch):
    monkeypatch.setattr(supervisor, "_LONGEST_START_PAUSE_S", 0.01)
    ranks = [rank(), rank(), rank()]
    run = asyncio.create_task(Unit(ranks, peer_grace_s=0.01).run())
    pids = await all_ready(ranks)
    for _ in range(8):
        ranks[1].process.kill()
        await eventually_async(lambda: run.done() or ranks[1].process.pid not in pids)
        pids.add(ranks[1].process.pid)
    await all_ready(ranks)
    assert not run.done()
    await ended(run)


def pauses(*lives: float | None) -> list[float]:
    """Behind lives that served for so long; None: they were not ready."""
    pause_s, found = FIRST_PAUSE_S, []
    for served_s in lives:
        pause_s = next_pause(pause_s, served_s)
        found.append(pause_s)
    return found


def test_who_hardly_serves_waits_longer_each_time_and_who_does_not_at_all_longest():
    assert pauses(*[None] * 11) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 30]
    assert pauses(*[9.0] * 6) == [0.2, 0.4, 0.8, 1.6, 2, 2]
    assert pauses(None, *[9.0] * 4, 11.0, None) == [0.2, 0.4, 0.8, 1.6, 2, 0.1, 0.2]
    assert pauses(*[None] * 9, 1.0) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 2]


async def test_a_child_that_does_not_end_is_killed_at_once_when_it_has_to_be(child, lines):
    run, stop = asyncio.create_task(Unit([child]).run()), Stop()
    await started(lines)
    child.process.send_signal(signal.SIGSTOP)  # it will not hear
    await ended(run)
    stop.at_once.set()
    await asyncio.wait_for(child.stop(stop, drain_s=1e6), 30)
    assert child.process.returncode == -signal.SIGKILL
