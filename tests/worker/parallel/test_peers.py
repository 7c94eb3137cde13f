"""Workers reach each other, and notice when one has gone."""

import threading
import time

import numpy as np
import pytest
import torch

from bench.server import free_port
from services.worker.described.ranks import Ranks
from services.worker.parallel import exchange
from services.worker.parallel.errors import ParallelError
from services.worker.parallel.group import RankGroup
from tests.worker.driver import Driver, admission, batch
from tests.worker.parallel import jobs

# What a loss may take to show: connections end with a process. The machine may be busy.
SOON_S = 15.0


def connect(ranks: Ranks, port: int, step_s: float = 60.0) -> RankGroup:
    return RankGroup(ranks, "127.0.0.1", port, torch.device("cpu"), {}, start_s=30.0, step_s=step_s)


# -- jobs


def exchange_all(ranks: Ranks, port: int) -> list:
    """Every way there is to another rank."""
    group = connect(ranks, port)
    try:
        group.wait_for_all()
        found: list = [group.least(10 + ranks.index), group.union({7, 5 + ranks.index})]
        mine = torch.full((3, 2), float(ranks.tp_rank + 1))
        if ranks.tp_size > 1:
            total = mine.clone()
            torch.ops.tokasaurus.all_reduce_(total, exchange.TENSOR_RANKS)
            found.append(total[0, 0].item())
            found.append(torch.ops.tokasaurus.gather_columns(mine, 2, exchange.TENSOR_RANKS)[2].tolist())
            own = torch.ops.tokasaurus.scatter_sums(mine * torch.arange(3)[:, None], 2, exchange.TENSOR_RANKS)
            found.append(own[:, 0].tolist())
            found.append(torch.ops.tokasaurus.gather_rows(own, 3, 2, exchange.TENSOR_RANKS)[:, 0].tolist())
            eighth = torch.tensor([[1.0 + ranks.tp_rank]]).to(torch.float8_e4m3fn)
            whole = torch.ops.tokasaurus.gather_rows(eighth, 2, 2, exchange.TENSOR_RANKS)
            found.append(whole.float()[:, 0].tolist())
        if group.to_next is not None:
            for number in range(20):  # more than may be on their way
                group.to_next.send(torch.tensor([float(number), float(ranks.tp_rank)]))
        if group.from_previous is not None:
            found.append([group.from_previous.receive((2,), torch.float32).tolist() for _ in range(20)][-1])
        if group.tokens_out is not None:
            group.tokens_out.send(torch.tensor([ranks.index]))
        if group.tokens_in is not None:
            found.append(group.tokens_in.receive((1,), torch.int64).tolist())
        group.drain()
        return found
    finally:
        group.close()


def wait_in_vain(ranks: Ranks, port: int, step_s: float) -> tuple[str, float] | None:
    """Rank 0 needs the other, which does not answer."""
    group = connect(ranks, port, step_s=step_s)
    started = time.monotonic()
    try:
        if ranks.index == 1:
            group.wait_for_all()
        torch.ops.tokasaurus.all_reduce_(torch.ones(1), exchange.TENSOR_RANKS)
    except ParallelError as error:
        return str(error), time.monotonic() - started
    finally:
        group.close()
    return "nothing", 0.0


def find_causes(ranks: Ranks, port: int) -> tuple[str, str, str]:
    """Of a step that fails on rank 1 and, because of that, on rank 0; and the id under which they were started."""
    group, told, lost = connect(ranks, port), threading.Event(), []
    group.watch(lambda error: (lost.append(str(error)), told.set()))
    if ranks.index == 1:
        cause = group.cause(ZeroDivisionError("out of luck"))
    else:
        told.wait(SOON_S)
        cause = group.cause(ParallelError("the connection has ended"))
    group.close()
    return str(cause), lost[0], group.incarnation_id


def leave(ranks: Ranks, port: int) -> str | None:
    """Rank 1 leaves first. What each is told."""
    group, told, lost = connect(ranks, port), threading.Event(), []
    group.watch(lambda error: (lost.append(str(error)), told.set()))
    if ranks.index == 0:
        told.wait(SOON_S)
    group.close()
    return lost[0] if lost else None


# -- tests


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "expected"),
    [
        (
            2,
            1,
            [
                [10, [5, 6, 7], 3.0, [1, 1, 2, 2], [0, 3], [0, 3, 6], [1, 2]],
                [10, [5, 6, 7], 3.0, [1, 1, 2, 2], [6, 0], [0, 3, 6], [1, 2]],
            ],
        ),
        (1, 3, [[10, [5, 6, 7], [2]], [10, [5, 6, 7], [19, 0]], [10, [5, 6, 7], [19, 0]]]),
    ],
)
def test_ranks_reach_each_other(tp_size, pp_size, expected, pool):
    assert pool.run(exchange_all, tp_size, pp_size, free_port()) == expected


def test_tokens_and_activations_go_between_ranks_of_one_number(pool):
    found = pool.run(exchange_all, 2, 2, free_port())
    assert [each[-1] for each in found] == [[2], [3], [19, 0], [19, 1]]


def test_a_rank_that_does_not_answer_is_an_error_in_the_end(pool):
    (message, seconds), _ = pool.run(wait_in_vain, 2, 1, free_port(), 1.0)
    assert "a tensor-parallel rank of this replica is lost" in message
    assert 0.5 < seconds < SOON_S


def test_a_worker_that_leaves_says_so_and_is_told_nothing(pool):
    told = "rank tp_rank=0 pp_rank=1 of this replica has left; start all of its workers again"
    assert pool.run(leave, 1, 2, free_port()) == [told, None]


def test_ranks_end_for_one_reason_and_have_one_id(pool):
    (*first, one_id), (*second, other_id) = pool.run(find_causes, 2, 1, free_port())
    assert first == second == ["a step failed on rank tp_rank=1 pp_rank=0: out of luck"] * 2
    assert one_id == other_id != pool.run(find_causes, 2, 1, free_port())[0][2]


@pytest.mark.parametrize("lost", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_the_loss_of_a_worker_is_an_error_on_all_others(lost, pool, checkpoint):
    """At once, whether they run a step or not."""
    directory, driver = checkpoint("llama", num_attention_heads=4, head_dim=16), Driver(None)
    grid = [Ranks(tp, 2, pp, 2) for pp in range(2) for tp in range(2)]
    pool.run(jobs.start, 2, 2, free_port(), directory, {}, 10**6)
    pool.kill(lost)
    survivors = [ranks for ranks in grid if ranks.index != lost]
    told = f"{grid[lost].name()} of this replica is lost; start all of its workers again"
    assert [pool.ask(watch, ranks) for ranks in survivors] == [told] * 3
    plans = [driver.plan(admissions=(admission(0, np.arange(9), [0]),), batch=batch([0], [9]))]
    driver.steps = 1
    plans.append(driver.plan(batch=batch([0])))
    started = time.monotonic()
    for ranks in survivors:
        pool.members[ranks.index].ask(run_and_leave, ranks, plans)
    for ranks in survivors:
        assert "of this replica is lost" in pool.answer(ranks)
    assert time.monotonic() - started < SOON_S


def run_and_leave(ranks: Ranks, plans: list) -> str:
    """A job: the end of one is the end of the next."""
    try:
        jobs.run(ranks, plans)
    except ParallelError as error:
        return error.message
    finally:
        jobs.stop(ranks)
    return "nothing"


def watch(ranks: Ranks) -> str | None:
    """A job: what a rank that computes nothing is told."""
    told, lost = threading.Event(), []
    jobs.booted.group.watch(lambda error: (lost.append(str(error)), told.set()))
    told.wait(SOON_S)
    return lost[0] if lost else None


def test_a_step_that_fails_on_one_rank_fails_as_a_replica(pool, checkpoint):
    """The others would wait for it: its process is to end."""
    directory = checkpoint("llama", num_attention_heads=4, head_dim=16)
    pool.run(jobs.start, 1, 2, free_port(), directory, {}, 10**6)
    try:
        found = pool.run(fail_one, 1, 2)
        assert found[1] == "step 1 failed on rank tp_rank=0 pp_rank=1: out of luck"
    finally:
        pool.run(jobs.stop, 1, 2)


def fail_one(ranks: Ranks) -> str | None:
    """A job."""
    runner = jobs.booted.runner
    if ranks.last:
        runner._keep_tokens = _fail
    try:
        runner.run(Driver(None).plan(admissions=(admission(0, np.arange(9), [0]),), batch=batch([0], [5])))
    except ParallelError as error:
        return error.message
    return None


def _fail(*arguments) -> None:
    raise RuntimeError("out of luck")
