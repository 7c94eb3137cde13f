"""Several ranks follow grammars as one does: the rank that reports computes the masks of all."""

import shutil
import threading
from dataclasses import replace

import pytest

from bench.server import free_port
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.worker.sampling import grammar_timeouts
from tests.worker.driver import Driver, admission, batch
from tests.worker.grammars import BROKEN, LISTS, OBJECTS, WORDS, answer, follows
from tests.worker.interpreter import INTERPRETED, needs_triton
from tests.worker.parallel.cases import SIZES, prompt_of
from tests.worker.parallel.cuda_jobs import plain_outputs, plan, run_as_rank, same
from tests.worker.parallel.jobs import run_on
from tests.worker.parallel.replica import alone, cut
from tests.worker.parallel.replica import same as same_steps

END = 1
KINDS = (
    {"grammar": WORDS, "temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "logprobs": True},
    {"grammar": OBJECTS, "temperature": 1.3, "seed": 3, "top_k": 30, "logprobs": True, "top_logprobs": 2},
    {"grammar": BROKEN},
    {"grammar": LISTS, "repetition_penalty": 1.2, "temperature": 0.5},
)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_cpus_follow_them(tp_size, pp_size, checkpoint, replica_of):
    directory = checkpoint("llama", **SIZES)
    runner, replica, rows = alone(directory), replica_of(tp_size, pp_size, directory), len(KINDS)
    assert replica.limits.grammars
    driver = Driver(runner)
    admissions = tuple(
        admission(row, prompt_of(5 + row, row), range(4 * row, 4 * row + 4), **kind) for row, kind in enumerate(KINDS)
    )
    again = admission(1, prompt_of(3, 9), range(20, 24), grammar=OBJECTS)
    plans = [
        driver.plan(admissions=admissions, batch=batch(range(rows), range(5, 10)), micro_batch_rows=cut(rows, 3)),
        driver.plan(batch=batch(range(rows)), micro_batch_rows=cut(rows, 2)),
        *[driver.plan() for _ in range(4)],
        driver.plan(batch=batch([4, 0])),
        driver.plan(releases=[1], admissions=(again,), batch=batch([0, 1, 2, 3, 4], [1, 3, 1, 1, 1])),
        driver.plan(batch=batch(range(rows)), micro_batch_rows=cut(rows, 2)),
        *[driver.plan() for _ in range(25)],
    ]
    plans = [replace(each, step=number + 1) for number, each in enumerate(plans)]
    runner.reset()
    expected, found = run_on(runner, plans), replica.run_all(plans)
    same_steps(expected, found)
    assert [output.failures for output, _ in found] == [output.failures for output, _ in expected]
    tokens = {slot: [] for slot in range(rows)}
    for output, _ in found:
        for slot, token in zip(output.sampled.slots.tolist(), output.sampled.token_ids.tolist(), strict=True):
            tokens[slot].append(token)
    tokenizer = Tokenizer.load(str(directory))
    assert follows(WORDS, answer(tokenizer, tokens[0], {END}))
    assert follows(OBJECTS, answer(tokenizer, tokens[2], {END}))


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_no_rank_waits_longer_for_a_compilation_than_the_one_that_reports(tp_size, pp_size, checkpoint, replica_of):
    """Three grammars are never compiled. Their sequences fail, and the replica continues."""
    replica = replica_of(tp_size, pp_size, checkpoint("llama", **SIZES))
    driver, prompt = Driver(replica), prompt_of(9)
    (expected,) = driver.generate([prompt], 3)
    driver.reset()
    replica.call(block_compilation)
    kinds = {}, *({"grammar": f"{WORDS} // {slot}"} for slot in range(3))
    admissions = tuple(admission(slot, prompt, [2 * slot, 2 * slot + 1], **kind) for slot, kind in enumerate(kinds))
    outputs = [driver.run(admissions=admissions, batch=batch(range(4), [9] * 4))]
    outputs += [driver.run(batch=batch(range(4))) for _ in range(2)]
    begun = replica.call(unblock_compilation)
    assert sum(begun) == begun[(pp_size - 1) * tp_size]
    for output in outputs:
        assert output.sampled.finite.tolist() == [True, False, False, False]
        assert all("not compiled in time" in output.failures[slot].message for slot in (1, 2, 3))
    assert driver.tokens[0] == expected


class Compilation:
    """The compilation of grammars in this process, which does not end before it is unblocked."""

    def __init__(self) -> None:
        self.patch, self.unblocked, self.count = pytest.MonkeyPatch(), threading.Event(), 0
        self.patch.setattr(grammar_timeouts, "COMPILE_TIMEOUT_S", 0.0)
        self.patch.setattr(Grammars, "matcher", self.wait)

    def wait(self, grammar: str) -> None:
        self.count += 1
        self.unblocked.wait()


blocked: Compilation  # of this process, between two jobs


def block_compilation(ranks) -> None:
    """A job."""
    global blocked
    blocked = Compilation()


def unblock_compilation(ranks) -> int:
    """A job: return how many compilations have begun."""
    blocked.patch.undo()
    blocked.unblocked.set()
    return blocked.count


@pytest.mark.parametrize("lacking", [0, 1])
def test_grammars_need_the_tokenizer_of_the_rank_that_reports(lacking, checkpoint, replica_of, pool, tmp_path):
    from tests.worker.parallel import jobs

    whole, without = checkpoint("llama", **SIZES), tmp_path / "model"
    shutil.copytree(whole, without)
    (without / "tokenizer.json").unlink()
    limits = pool.run(start_with, 2, 1, free_port(), whole, without, lacking)
    pool.run(jobs.stop, 2, 1)
    assert [each.grammars for each in limits] == [lacking == 1] * 2


def start_with(ranks, port, whole, without, lacking):
    """A job: the tokenizer of the rank ``lacking`` is that of another directory, where there is none."""
    from tests.worker.parallel import jobs

    flags = {"tokenizer": str(without if ranks.tp_rank == lacking else whole)}
    return jobs.start(ranks, port, whole, flags, 10**6)


def history() -> list:
    """Rows with grammars in several micro-batches, beside others; rows that pause and slots that are used again."""
    rows = [
        {"grammar": WORDS, "temperature": 0.9},
        {"temperature": 0.9, "seed": 2},
        {"grammar": OBJECTS, "temperature": 1.2, "seed": 4, "top_k": 5},
        {"grammar": LISTS, "logprobs": True, "top_logprobs": 2},
    ]
    admissions = tuple(
        admission(slot, [11 + slot, 12, 13], range(8 * slot, 8 * slot + 6), **row) for slot, row in enumerate(rows)
    )
    again = admission(0, [9, 8, 7], range(40, 46), grammar=OBJECTS, temperature=0.5)
    return [
        plan(1, admissions=admissions, batch=batch(range(4), [3, 3, 3, 2]), micro_batch_rows=(2, 1, 1)),
        plan(2, batch=batch(range(4)), micro_batch_rows=(1, 3)),
        plan(3),
        plan(4, batch=batch([3, 1, 2]), micro_batch_rows=(1, 2)),
        plan(5, releases=[0], admissions=(again,), batch=batch([0, 1, 2], [3, 1, 1]), micro_batch_rows=(1, 2)),
        plan(6, batch=batch([3, 2, 1, 0]), micro_batch_rows=(2, 0, 2)),
        plan(7),
        plan(8, batch=batch([1])),
        plan(9, batch=batch([0, 2]), micro_batch_rows=(1, 1)),
    ]


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for the devices here")
@pytest.mark.parametrize(
    ("tp_size", "pp_size", "graphs", "ahead", "times"),
    [
        (1, 2, 0, 2, 2),
        pytest.param(2, 1, 8, 3, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, 8, 3, 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_the_gpus_runner_follow_them(tp_size, pp_size, graphs, ahead, times, pool):
    plans = history()
    everyone = pool.run(run_as_rank, tp_size, pp_size, free_port(), plans, graphs, ahead, 9, times)
    same(plain_outputs(plans), everyone[(pp_size - 1) * tp_size])
