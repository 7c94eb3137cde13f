"""A replica of two worker processes as a scheduler sees it: a stream to each, the same plans on both."""

import asyncio
import json
import signal
import uuid
from pathlib import Path

import grpc
import pytest

from bench.server import free_port
from services.common.errors import PEER_LOST_STATUS
from tests.gateway.deployment import Process
from tests.worker.driver import Driver
from tests.worker.parallel.cases import prompt_of
from tests.worker.parallel.jobs import FLAGS
from tests.worker.parallel.replica import alone
from tests.worker.scheduler import Scheduler, admission, status_of
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

NAMES = ["rank tp_rank=0 pp_rank=0", "rank tp_rank=1 pp_rank=0"]
# A worker that starts is looked for more often than once in seconds.
EAGER = [(f"grpc.{name}_reconnect_backoff_ms", 100) for name in ("initial", "min", "max")]
ONE_ROW = plan_pb2.Batch(slots=[0])


class Workers:
    """The processes of one replica, one for each rank."""

    def __init__(self, folder: Path, model: Path) -> None:
        flags = FLAGS | {"model": model, "device": "cpu", "tp_size": 2, "master_port": free_port()}
        folder.mkdir()
        self.addresses = [f"unix:{folder}/{rank}" for rank in range(2)]
        self._processes = [
            Process(folder / f"{rank}.log", "services.worker", worker_listen=address, tp_rank=rank, **flags)
            for rank, address in enumerate(self.addresses)
        ]

    @property
    def running(self) -> bool:
        return all(process.running for process in self._processes)

    def signal(self, rank: int, number: int) -> None:
        self._processes[rank].signal(number)

    def wait(self, rank: int) -> int:
        return self._processes[rank].wait()

    def last_words(self, rank: int) -> str:
        """Why its process had to end."""
        lines = map(json.loads, self._processes[rank].log.read_text().splitlines())
        (reason,) = [line["reason"] for line in lines if line["event"] == "cannot continue"]
        return reason

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


@pytest.fixture(scope="module")
def model(checkpoint) -> Path:
    return checkpoint("llama", num_attention_heads=4, head_dim=16)


@pytest.fixture(scope="module")
def started(model, tmp_path_factory):
    """``started()``: running workers, which are started again if they have ended."""
    everyone = []

    def get() -> Workers:
        if not everyone or not everyone[-1].running:
            everyone.append(Workers(tmp_path_factory.mktemp("replica") / "workers", model))
        return everyone[-1]

    yield get
    for workers in everyone:
        workers.kill()


@pytest.fixture
def workers(started) -> Workers:
    return started()


class Replica:
    """A scheduler of all ranks."""

    def __init__(self, workers: Workers) -> None:
        self.channels = [grpc.aio.insecure_channel(address, options=EAGER) for address in workers.addresses]
        self.ranks = [Scheduler(channel) for channel in self.channels]

    async def connect(self) -> "Replica":
        stream_id = uuid.uuid4().hex
        for rank in self.ranks:
            await rank.connect(stream_id=stream_id)
        return self

    async def run(self, **parts) -> list[plan_pb2.StepResult]:
        """Return the result of each rank for the same plan."""
        for rank in self.ranks:
            await rank.send(**parts)
        return [await rank.result() for rank in self.ranks]

    async def admit(self, prompt: list[int]) -> list[plan_pb2.StepResult]:
        """Into slot 0."""
        return await self.run(
            admissions=[admission(0, prompt, [0, 1])], batch=plan_pb2.Batch(slots=[0], token_counts=[len(prompt)])
        )

    async def generate(self, prompt: list[int], count: int) -> list[int]:
        """Tokens, from the first rank; the other gives none."""
        results = [await self.admit(prompt), await self.run(batch=ONE_ROW)]
        results += [await self.run() for _ in range(count - 2)]
        assert all(list(first.slots) == [0] and not second.slots for first, second in results)
        return [first.token_ids[0] for first, _ in results]

    async def finish(self) -> None:
        """End all streams well."""
        for rank in self.ranks:
            await rank.call.done_writing()
        for rank in self.ranks:
            assert await rank.call.read() is grpc.aio.EOF
            assert await rank.call.code() == grpc.StatusCode.OK


@pytest.fixture
async def replica_at(workers):
    """``await replica_at()``: a scheduler with streams to all ranks."""
    made = []

    async def connect() -> Replica:
        made.append(Replica(workers))
        return await made[-1].connect()

    yield connect
    for replica in made:
        for channel in replica.channels:
            await channel.close()


@pytest.mark.slow
async def test_ranks_say_which_they_are_and_that_they_belong_together(workers):
    replica = Replica(workers)
    first, second = [await rank.info() for rank in replica.ranks]
    assert first.incarnation_id == second.incarnation_id != ""
    one = worker_pb2.Rank(rank=0, size=1)
    for rank, info in enumerate((first, second)):
        assert info.tensor_parallel == worker_pb2.Rank(rank=rank, size=2)
        assert info.pipeline_parallel == one
        assert info.max_micro_batches == 1
    for channel in replica.channels:
        await channel.close()


async def test_the_same_plans_on_all_ranks_give_what_one_worker_gives(replica_at, model):
    prompt = prompt_of(20)
    (expected,) = Driver(alone(model)).generate([prompt], 6)
    assert await (await replica_at()).generate(prompt, 6) == expected


@pytest.mark.parametrize("end", ["half-close", "cancel", "take-over"])
async def test_a_stream_that_has_ended_alike_everywhere_is_followed_by_another(end, replica_at):
    replica = await replica_at()
    await replica.admit(prompt_of(5))
    if end == "half-close":
        await replica.finish()
    elif end == "cancel":
        for rank in replica.ranks:
            rank.call.cancel()
    again = await replica_at()
    if end == "take-over":
        for rank in replica.ranks:
            assert (await status_of(rank.result()))[0] == grpc.StatusCode.ABORTED
    assert len(await again.generate(prompt_of(20), 4)) == 4
    await again.finish()


async def test_a_refused_plan_is_refused_by_all_ranks_which_go_on(replica_at):
    replica = await replica_at()
    await replica.admit(prompt_of(5))
    unknown = {"batch": plan_pb2.Batch(slots=[7])}
    await replica.ranks[0].send_together(unknown, {"batch": ONE_ROW})
    await replica.ranks[1].send_together(unknown)
    for rank in replica.ranks:
        code, details = await status_of(rank.result())
        assert (code, "slot 7 is not in use" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert len(await (await replica_at()).generate(prompt_of(5), 3)) == 3


async def test_a_hello_to_one_of_several_ranks_says_which_stream_it_is(workers, replica_at):
    rank = (await replica_at()).ranks[0]
    code, details = await status_of(rank.connect())
    assert (code, "stream_id is empty" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_ranks_that_were_given_different_plans_end(workers, replica_at):
    """A rank is in a step that the other rank never runs."""
    replica = await replica_at()
    await replica.admit(prompt_of(5))
    await replica.ranks[0].send(batch=ONE_ROW)
    for rank in replica.ranks:
        await rank.call.done_writing()
    told = (
        f"a stream of plans has ended with different numbers of them (2 on {NAMES[0]}, 1 on {NAMES[1]}); start all"
        " workers of this replica again"
    )
    for rank in range(2):
        assert await asyncio.to_thread(workers.wait, rank) == PEER_LOST_STATUS
        assert workers.last_words(rank) == told


@pytest.mark.slow
async def test_a_rank_that_is_told_to_stop_ends_well_and_the_other_with_it(workers, replica_at):
    replica = await replica_at()
    workers.signal(1, signal.SIGTERM)
    assert await asyncio.to_thread(workers.wait, 1) == 0
    assert await asyncio.to_thread(workers.wait, 0) == PEER_LOST_STATUS
    told = f"{NAMES[1]} of this replica has left; start all of its workers again"
    assert workers.last_words(0) == told
    assert await status_of(replica.ranks[0].result()) == (grpc.StatusCode.UNAVAILABLE, told)


async def test_a_rank_that_is_killed_in_a_step_is_named_by_the_other(workers, replica_at):
    replica = await replica_at()
    await replica.admit(prompt_of(5))
    await replica.ranks[1].send(batch=ONE_ROW)
    workers.signal(0, signal.SIGKILL)
    assert await asyncio.to_thread(workers.wait, 1) == PEER_LOST_STATUS
    lost = f"{NAMES[0]} of this replica is lost; start all of its workers again"
    assert workers.last_words(1) == lost
    assert await status_of(replica.ranks[1].result()) == (grpc.StatusCode.UNAVAILABLE, lost)
