"""Workers that stand still, die of a request, or stay away: who is at fault ends, others get their whole answers."""

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.rpc import code_pb2
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from services.common.errors import Internal, InvalidRequest
from tests.fakes.model import FakeShape, continuation
from tests.fakes.worker import FakeWorker
from tests.scheduler.service import PROMPT, session, start, with_scheduler
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import session_pb2

SHAPE = FakeShape()
POISON = 9  # below the tokens that the fake chooses


def request(seed: int, most: int = 60, prompt: list[int] = PROMPT, **stopping) -> dict:
    return {
        "tokens": g.TokenPrompt(token_ids=prompt),
        "sampling": g.Sampling(seed=seed),
        "stopping": g.Stopping(max_tokens=most, **stopping),
    }


def detail(status, kind):
    """The detail of this kind in a ``google.rpc.Status``."""
    found = kind()
    for each in status.details:
        if each.Is(kind.DESCRIPTOR):
            each.Unpack(found)
    return found


class Process:
    """A fake worker in a process of its own, which signals can stop and kill."""

    def __init__(self, path: Path, **flags) -> None:
        self.address = f"unix:{path}"
        self._flags = [f"{name}={value}" for name, value in {"listen": self.address, **flags}.items()]

    async def start(self) -> None:
        command = sys.executable, "-m", "tests.fakes.worker", *self._flags
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert b"listening" in await self._process.stdout.readline()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def process_worker(path: Path, **flags):
    worker = Process(path, **flags)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.kill()


@pytest.mark.parametrize("goes_on_as", ["the same", pytest.param("another", marks=pytest.mark.slow)])
async def test_a_worker_that_is_stopped_is_fenced_and_its_requests_go_on(tmp_path, goes_on_as):
    async with (
        process_worker(tmp_path / "worker", step_ms=5) as worker,
        with_scheduler([worker.address], step_deadline=1) as service,
        session(service) as client,
    ):
        for handle in range(4):
            await client.submit(handle, **request(handle, most=400))
        while len(client.samples[3].tokens) < 20:
            await client.read()
        worker.signal(signal.SIGSTOP)
        silent = f"worker {worker.address} has returned no result of plan "
        load = await service.until_load(lambda load: load.not_ready_reason)
        assert load.not_ready_reason.startswith(silent)
        assert "for 1 s" in load.not_ready_reason
        assert not load.ready
        assert load.waiting_sequences == 4
        await service.until_health(False)
        if goes_on_as == "the same":
            worker.signal(signal.SIGCONT)
        else:
            await worker.kill()
            await worker.start()
        await client.finished(*range(4))
        for handle in range(4):
            assert client.samples[handle].tokens == continuation(SHAPE, PROMPT, 400, seed=handle)
        load = await service.load()
        assert (load.ready, load.not_ready_reason) == (True, "")


async def test_one_poisoned_among_two_hundred_ends_and_all_others_are_right():
    worker = FakeWorker(
        FakeShape(max_tokens_per_step=2048),
        # Its 17th token is the fatal one.
        lambda tokens, index: POISON if tokens[0] == 77 and len(tokens) == 36 else None,
    )
    worker.poison = POISON
    async with start(worker=worker) as service, session(service) as client:
        for handle in range(200):
            await client.submit(handle, **request(handle, most=40, prompt=PROMPT[: 1 + handle % 40]))
        await client.submit(200, request_id="the poison", **request(5, prompt=[77, *PROMPT[:19]]))
        await client.finished(*range(201))
        for handle in range(200):
            expected = continuation(worker.shape, PROMPT[: 1 + handle % 40], 40, seed=handle)
            assert client.samples[handle].tokens == expected
        bad = client.samples[200]
        assert bad.tokens == continuation(worker.shape, [77, *PROMPT[:19]], 16, seed=5)
        assert bad.finish.reason == g.FINISH_REASON_ERROR
        assert bad.finish.error.code == code_pb2.INTERNAL
        assert detail(bad.finish.error, ErrorInfo).reason == "QUARANTINED"
        assert "the last 2 times while it computed nothing else" in bad.finish.error.message
        assert worker.deaths <= 8


def _refuse() -> None:
    raise InvalidRequest("admissions[0]: nobody can run this", field="plan.admissions[0]")


def _fail() -> None:
    raise Internal("step 1 failed; the worker's log has the details")


@pytest.mark.parametrize("trouble", [_refuse, _fail])
async def test_a_request_that_makes_the_worker_refuse_plans_or_fail_steps_is_no_endless_loop(trouble):
    worker = FakeWorker()
    worker.poison, worker.end_of = POISON, trouble
    async with start(worker=worker) as service, session(service) as client:
        await client.submit(0, **request(0))
        await client.submit(1, **request(1, prompt=[POISON, *PROMPT]))
        await client.submit(2, **request(2))
        await client.finished(0, 1, 2)
        assert detail(client.samples[1].finish.error, ErrorInfo).reason == "QUARANTINED"
        for handle in (0, 2):
            assert client.samples[handle].tokens == continuation(SHAPE, PROMPT, 60, seed=handle)
        assert worker.deaths <= 8


class Broken(FakeWorker):
    """Dies of every plan while it is broken."""

    broken = True

    def _is_poisoned(self, plan, result) -> bool:
        return self.broken


async def test_a_worker_that_dies_whatever_it_computes_is_not_ready_and_ends_nobody():
    worker = Broken()
    worker.poison = POISON
    async with start(worker=worker) as service, session(service) as client:
        for handle in range(20):
            await client.submit(handle, **request(handle))
        await service.until_load(lambda load: "in a row before it answered anything" in load.not_ready_reason)
        await service.until_health(False)
        await service.until_load(lambda load: load.counters.worker_restarts >= 12)
        assert not any(sample.tokens or sample.finish for sample in client.samples.values())
        worker.broken = False
        await client.finished(*range(20))
        for handle in range(20):
            assert client.samples[handle].tokens == continuation(SHAPE, PROMPT, 60, seed=handle)
        load = await service.load()
        assert (load.ready, load.not_ready_reason) == (True, "")


async def test_requests_wait_for_a_lost_worker_within_the_bounds_of_the_queue_and_their_deadlines():
    async with start(max_queued_sequences=5) as service, session(service) as client:
        worker = service.worker
        worker.hold()
        await client.submit(0, **request(0))
        await worker.received(1)
        await worker.stop()
        await service.until_load(lambda load: not load.ready)
        await client.submit(1, **request(1), n=3, deadline_unix_ms=int(time.time() * 1000) + 300)
        await client.submit(10, **request(10))
        await client.decided(10)
        await client.submit(11, **request(11))  # the sixth: with the one that ran
        await client.decided(11)
        refused = client.rejected[11]
        assert refused.code == code_pb2.RESOURCE_EXHAUSTED
        assert detail(refused, RetryInfo).retry_delay.ToMilliseconds() == 2000
        await client.finished(1, 2, 3)
        assert {client.samples[handle].finish.reason for handle in (1, 2, 3)} == {g.FINISH_REASON_DEADLINE}
        await client.submit(12, **request(12))  # there is room again
        await client.decided(12)
        await client.send(cancel=session_pb2.Cancel(handles=[12]))
        await client.finished(12)
        worker.release()
        await worker.start(worker.address)
        await client.finished(0, 10)
        for handle in (0, 10):
            assert client.samples[handle].tokens == continuation(SHAPE, PROMPT, 60, seed=handle)
