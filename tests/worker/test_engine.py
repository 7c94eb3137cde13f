"""The engine's two threads, with a runner whose steps end when the test says so."""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.plan.types import Plan
from services.worker.boot.common import Booted
from services.worker.engine.engine import Engine
from services.worker.parallel.errors import ParallelError
from services.worker.runner.base import DeviceLost
from services.worker.step.output import Sampled, StepOutput
from tokasaurus.worker.v1 import plan_pb2

SECONDS = 10.0  # that anything may take
NONE = np.empty(0, np.int64)


class Step:
    """Ends when ``may_end`` is set."""

    def __init__(self, number: int) -> None:
        self.number, self.may_end, self.error = number, threading.Event(), None

    def result(self) -> StepOutput:
        assert self.may_end.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return StepOutput(self.number, Sampled(NONE, NONE, np.empty(0, bool)))


class LateRunner:
    """Every plan becomes a ``Step``, but for those that are refused."""

    limits = None

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.refused: set[int] = set()
        self.resets = 0
        self.closed = False

    def start(self, plan: Plan) -> Step:
        if plan.step in self.refused:
            raise FailedPrecondition(f"step {plan.step} is refused")
        self.steps[plan.step] = Step(plan.step)
        return self.steps[plan.step]

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        self.closed = True


class Listener:
    """A client that writes down what it is told."""

    def __init__(self, stream_id: str = "") -> None:
        self.stream_id = stream_id
        self.closed = False
        self.told: list[int | str] = []

    def answer(self, result: plan_pb2.StepResult, *, with_next: bool = False) -> None:
        self.told.append(result.step)

    def fail(self, error: TokaError) -> None:
        self.told.append(error.message)

    def finish(self) -> None:
        self.told.append("finished")


class OtherRanks:
    """Stands for a replica's connections: keeps what they are told."""

    def __init__(self) -> None:
        self.agreement = self
        self.settled: list[tuple[str, int, bool]] = []

    def watch(self, on_lost: Callable[[ParallelError], None]) -> None:
        self.lose = on_lost

    def cause(self, error: BaseException) -> ParallelError:
        return ParallelError(f"because of {error}")

    def settle(self, stream_id: str, plans: int, *, refused: bool = False) -> None:
        self.settled.append((stream_id, plans, refused))


@pytest.fixture
def runner() -> LateRunner:
    return LateRunner()


@pytest.fixture
def group(request) -> OtherRanks | None:
    """None, but for tests that are marked ``in_a_group``."""
    return OtherRanks() if hasattr(request, "param") else None


in_a_group = pytest.mark.parametrize("group", ["others"], indirect=True)


@pytest.fixture
async def started(runner, group):
    """The engine, serving, and the future of its end."""
    engine = Engine(lambda: Booted(runner, "late", "none", "none", group=group))
    booted, ended = engine.start()
    await booted
    yield engine, ended
    for step in runner.steps.values():
        step.may_end.set()
    engine.stop()
    await asyncio.wait((ended,), timeout=SECONDS)
    if not ended.cancel():
        ended.exception()


@pytest.fixture
def engine(started) -> Engine:
    return started[0]


@pytest.fixture
def ended(started) -> asyncio.Future:
    return started[1]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(SECONDS / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise TimeoutError


async def submit(engine: Engine, client: Listener, runner: LateRunner, *steps: int) -> None:
    """Returns when those that are not refused run."""
    for step in steps:
        engine.submit(client, plan_pb2.StepPlan(step=step))
    await until(lambda: set(steps) - runner.refused <= runner.steps.keys())


async def test_steps_that_end_out_of_turn_are_answered_in_order(engine, runner):
    client = Listener()
    engine.open(client)
    await submit(engine, client, runner, 1, 2, 3)
    for step in (3, 2):
        runner.steps[step].may_end.set()
    await asyncio.sleep(0.02)
    assert client.told == []
    runner.steps[1].may_end.set()
    await until(lambda: len(client.told) == 3)
    assert client.told == [1, 2, 3]


async def test_a_plan_is_started_while_the_one_before_runs(engine, runner):
    client = Listener()
    engine.open(client)
    await submit(engine, client, runner, 1, 2)
    assert client.told == []


async def test_the_end_is_told_behind_the_last_answer(engine, runner):
    client = Listener()
    engine.open(client)
    await submit(engine, client, runner, 1, 2)
    engine.finish(client)
    runner.steps[1].may_end.set()
    await until(lambda: client.told == [1])
    await asyncio.sleep(0.02)
    assert client.told == [1]
    runner.steps[2].may_end.set()
    await until(lambda: len(client.told) == 3)
    assert client.told == [1, 2, "finished"]


async def test_a_refused_plan_is_told_behind_the_answers_before_it(engine, runner):
    client = Listener()
    runner.refused = {3}
    engine.open(client)
    await submit(engine, client, runner, 1, 2, 3)
    await until(lambda: runner.resets == 2)  # the takeover's, and the refusal's
    assert client.told == []
    for step in (1, 2):
        runner.steps[step].may_end.set()
    await until(lambda: len(client.told) == 3)
    assert client.told == [1, 2, "step 3 is refused"]


async def test_plans_behind_a_refused_one_are_dropped(engine, runner):
    client = Listener()
    runner.refused = {1}
    engine.open(client)
    engine.submit(client, plan_pb2.StepPlan(step=1))
    engine.submit(client, plan_pb2.StepPlan(step=2))
    await until(lambda: client.told == ["step 1 is refused"])
    assert not runner.steps


async def test_a_step_that_the_device_fails_with_ends_the_engine(engine, ended, runner):
    client = Listener()
    engine.open(client)
    await submit(engine, client, runner, 1, 2)
    runner.steps[2].error = RuntimeError("the device is gone")
    for step in (1, 2):
        runner.steps[step].may_end.set()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RuntimeError, match="the device is gone"):
            await ended
    assert client.told == [1]
    assert not runner.closed  # it would wait for the device


async def test_a_device_that_is_lost_at_launch_ends_the_engine(engine, ended, runner, monkeypatch):
    def lose(plan: Plan) -> Step:
        raise DeviceLost("the device is lost")

    monkeypatch.setattr(runner, "start", lose)
    client = Listener()
    engine.open(client)
    engine.submit(client, plan_pb2.StepPlan(step=1))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(DeviceLost):
            await ended


async def test_a_stopped_engine_answers_what_runs_and_closes_the_runner(engine, ended, runner):
    client = Listener()
    engine.open(client)
    await submit(engine, client, runner, 1)
    engine.stop()
    await asyncio.sleep(0.02)
    assert not ended.done()
    runner.steps[1].may_end.set()
    async with asyncio.timeout(SECONDS):
        await ended
    assert client.told == [1]
    assert runner.closed


async def test_a_runner_that_fails_to_close_does_not_hide_the_end(engine, ended, runner):
    def fail() -> None:
        raise RuntimeError("the device is gone")

    runner.close = fail
    engine.stop()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RuntimeError, match="the device is gone"):
            await ended


async def test_a_client_that_is_gone_is_told_nothing(engine, runner):
    first, second = Listener(), Listener()
    engine.open(first)
    await submit(engine, first, runner, 1)
    first.closed = True
    engine.close(first)
    engine.open(second)
    await until(lambda: runner.resets == 3)
    running = runner.steps.pop(1)
    await submit(engine, second, runner, 1)
    for step in (running, runner.steps[1]):
        step.may_end.set()
    await until(lambda: second.told == [1])
    assert first.told == []


async def test_the_time_of_a_step_that_does_not_end_grows(engine, runner):
    client = Listener()
    assert engine.busy_s() < 0.001
    engine.open(client)
    await submit(engine, client, runner, 1)
    await until(lambda: engine.busy_s() > 0.02)
    earlier = engine.busy_s()
    await asyncio.sleep(0.02)
    assert engine.busy_s() >= earlier + 0.015
    runner.steps[1].may_end.set()
    await until(lambda: client.told == [1])
    await until(lambda: engine.busy_s() < 0.001)


async def test_the_plans_of_a_client_that_is_gone_are_dropped(engine, runner):
    gone, here = Listener(), Listener()
    gone.closed = True
    engine.open(gone)
    engine.submit(gone, plan_pb2.StepPlan(step=1))
    engine.open(here)
    await submit(engine, here, runner, 2)
    assert runner.steps.keys() == {2}


@in_a_group
async def test_a_rank_runs_what_it_has_received_of_a_client_that_is_gone(engine, runner, group):
    gone = Listener("a stream")
    gone.closed = True
    engine.open(gone)
    for step in (1, 2):
        engine.submit(gone, plan_pb2.StepPlan(step=step))
    engine.close(gone)
    engine.submit(gone, plan_pb2.StepPlan(step=3))  # is not counted, and so not run
    await until(lambda: runner.resets == 2)  # the takeover's, and behind the plans the close's
    assert runner.steps.keys() == {1, 2}
    assert group.settled == [("a stream", 2, False)]


@in_a_group
@pytest.mark.parametrize("end", ["finish", "close", "open"])
async def test_a_stream_is_settled_once_however_it_ends(end, engine, runner, group):
    first, second = Listener("first"), Listener("second")
    engine.open(first)
    await submit(engine, first, runner, 1)
    if end == "open":
        engine.open(second)
    else:
        getattr(engine, end)(first)
    assert group.settled == [("first", 1, False)]
    engine.finish(first)
    engine.close(first)
    engine.open(second)
    engine.close(second)
    assert [stream for stream, _, _ in group.settled].count("first") == 1
    assert group.settled[-1] == ("second", 0, False)


@in_a_group
async def test_a_refused_plan_is_none_of_those_that_all_ranks_run(engine, runner, group):
    client = Listener("a stream")
    runner.refused = {3}
    engine.open(client)
    for step in (1, 2, 3, 4):
        engine.submit(client, plan_pb2.StepPlan(step=step))
    await until(lambda: runner.resets == 2)
    engine.close(client)
    assert group.settled == [("a stream", 2, True)]
    assert runner.steps.keys() == {1, 2}
    again = Listener("another")
    engine.open(again)
    await submit(engine, again, runner, 5)


@in_a_group
@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), ParallelError("a loss"), Unavailable("a defect")])
async def test_a_step_that_fails_on_one_rank_ends_it(error, engine, ended, runner, monkeypatch):
    def fail(plan: Plan) -> Step:
        raise error

    monkeypatch.setattr(runner, "start", fail)
    client = Listener("a stream")
    engine.open(client)
    engine.submit(client, plan_pb2.StepPlan(step=1))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ParallelError, match=f"because of {error}"):
            await ended
    assert client.told == []


@in_a_group
async def test_a_loss_ends_an_engine_whose_step_does_not_end(engine, ended, runner, group, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def hang(plan: Plan) -> Step:
        begun.set()
        assert may_end.wait(SECONDS)
        return Step(plan.step)

    monkeypatch.setattr(runner, "start", hang)
    client = Listener("a stream")
    engine.open(client)
    engine.submit(client, plan_pb2.StepPlan(step=1))
    await asyncio.to_thread(begun.wait)
    group.lose(ParallelError("a rank is lost"))
    try:
        async with asyncio.timeout(SECONDS):
            with pytest.raises(ParallelError, match="a rank is lost"):
                await ended
    finally:
        may_end.set()


async def test_a_call_between_two_steps_fails_when_the_engine_has_ended(engine, ended):
    goes_on = threading.Event()
    engine.run_alone(lambda: goes_on.wait(SECONDS) and None)
    engine.stop()
    waiting = engine.run_alone(lambda: None)
    goes_on.set()
    await asyncio.wait((ended,), timeout=SECONDS)
    for each in (waiting, engine.run_alone(lambda: None)):
        with pytest.raises(Unavailable, match="has ended"):
            each.result(SECONDS)
