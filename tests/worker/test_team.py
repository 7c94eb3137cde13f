"""Work that several threads share in compiled functions, against one thread."""

import threading

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import WorkerConfig
from services.worker.boot.common import boot
from services.worker.layers import team_cpu
from services.worker.layers.integers import IntegerLinear
from services.worker.layers.linear_cpu import addresses, storage_of
from services.worker.layers.panels import PanelLinear
from services.worker.layers.products_cpu import make_product, make_team_product
from services.worker.layers.team_cpu import claim, finish, new_counters, run_in_team, wait
from services.worker.runner.shards import ShardThreads
from tests.quick import quick_if
from tests.worker.driver import Driver, admission, batch
from tests.worker.test_panels import random
from tests.worker.test_quantization import fill


@numba.njit(nogil=True)
def _count(thread, counters, sizes, counted, seen):
    """Count each item of each phase, and note whether all items of the phase before were counted."""
    for phase in range(len(sizes)):
        item = claim(counters, phase, sizes[phase], thread)
        while item < sizes[phase]:
            if phase > 0 and counted[phase - 1, : sizes[phase - 1]].min() == 0:
                seen[0] = 1
            counted[phase, item] += 1
            finish(counters, phase)
            item = claim(counters, phase, sizes[phase], thread)
        wait(counters, phase, sizes[phase])


def run(threads: int, function, *arguments) -> None:
    """Run the compiled function in ``threads`` threads."""
    others = [threading.Thread(target=function, args=(index, *arguments)) for index in range(1, threads)]
    for each in others:
        each.start()
    function(0, *arguments)
    for each in others:
        each.join()


@given(st.integers(1, 4), st.lists(st.integers(1, 40), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_each_item_is_claimed_once_and_after_all_items_of_the_phase_before(threads, sizes):
    counted, unfinished = np.zeros((len(sizes), 40), np.int64), np.zeros(1, np.int64)
    run(threads, _count, new_counters(len(sizes), threads), np.array(sizes), counted, unfinished)
    assert [row[:size].tolist() for row, size in zip(counted, sizes, strict=True)] == [[1] * size for size in sizes]
    assert unfinished[0] == 0


def test_a_thread_that_starts_late_finds_nothing_left():
    sizes, counted, unfinished = np.array([3, 5]), np.zeros((2, 40), np.int64), np.zeros(1, np.int64)
    counters = new_counters(2, 2)
    _count(0, counters, sizes, counted, unfinished)
    _count(1, counters, sizes, counted, unfinished)
    assert counted.sum() == 8


LINEARS = {
    "float32": lambda: PanelLinear(64, [130, 70]),
    "bfloat16": lambda: PanelLinear(64, [130, 70], dtype=torch.bfloat16),
    "int8": lambda: IntegerLinear(64, [130, 70], bits=8),
    "int4": lambda: IntegerLinear(64, [130, 70], bits=4),
}


@pytest.mark.parametrize("kind", quick_if(lambda kind: kind == "bfloat16", LINEARS))
def test_a_product_of_a_team_is_that_of_one_thread(kind):
    linear = fill(LINEARS[kind](), random(200, 64), None)
    storage, (weight, scale) = storage_of(linear), addresses(linear)
    product, shared = make_product(storage), make_team_product(storage)

    @numba.njit(nogil=True)
    def alone(x, weight, scale, output, keep):
        product(x, weight, scale, output, keep)

    @numba.njit(nogil=True)
    def together(thread, counters, x, weight, scale, bias, output, keep):
        shared(thread, counters, 0, x, weight, scale, bias, output, keep)

    for rows in (1, 3, 16, 40, 300):
        for threads in (1, 2, 3):
            for keep, bias in ((0, np.empty(0, np.float32)), (1, random(200, seed=4).numpy())):
                x, expected = random(rows, 64, seed=rows).numpy(), random(rows, 200, seed=3).numpy()
                output = expected.copy()
                alone(x, weight, scale, expected, np.float32(keep))
                if bias.size:
                    expected += bias
                arguments = x, weight, scale, bias, output, np.float32(keep)
                run(threads, together, new_counters(1, threads), *arguments)
                np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("rows", [20, 48])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}], ids=["plain", "with top-p"])
def test_tokens_do_not_depend_on_the_number_of_threads(rows, architecture, others, checkpoint, monkeypatch):
    """Three threads share the operators for a single row and for 20 rows. With 48 rows, each computes its own rows."""
    monkeypatch.setattr(team_cpu, "_THREAD_BYTES", 1)
    found = []
    for threads in (1, 3):
        flags = {"device": "cpu", "kv_cache_num_tokens": 2048, "torch_num_threads": threads}
        runner = boot(WorkerConfig(model=str(checkpoint(architecture)), **flags)).runner
        driver = Driver(runner)
        first = admission(0, [3, 4, 5], [0, 1], temperature=0.8, seed=1, **others)
        driver.run(admissions=(first,), batch=batch([0], [3]))
        driver.run(batch=batch([0]))
        slots = list(range(rows))
        more = [
            admission(slot, [7, slot + 1], [2 * slot, 2 * slot + 1], temperature=0.8, seed=slot, **others)
            for slot in slots[1:]
        ]
        driver.run(admissions=tuple(more), batch=batch(slots, [1] + [2] * (rows - 1)))
        for _ in range(4):
            driver.run(batch=batch(slots))
        found.append([driver.tokens[slot] for slot in slots])
        runner.close()
    assert found[0] == found[1]


def test_threads_that_assist_run_while_the_caller_goes_on():
    threads, started, released = ShardThreads(3), threading.Barrier(3), threading.Event()

    def job() -> None:
        started.wait(30)
        released.wait(30)

    threads.assist([job, job])
    started.wait(30)
    released.set()
    assert threads.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
    threads.close()


def test_an_error_in_one_thread_ends_all_threads_and_reaches_the_caller():
    """The other threads would wait forever for the item that the failed one has claimed."""
    threads = ShardThreads(2)
    claimed = threading.Event()

    def work(thread: int, counters: np.ndarray) -> None:
        if thread == 1:
            claim(counters, 0, 2, thread)
            claimed.set()
            raise MemoryError("no memory for an item")
        assert claimed.wait(30)
        while (item := claim(counters, 0, 2, thread)) < 2:
            finish(counters, 0)
            assert item == 0
        wait(counters, 0, 2)

    with pytest.raises(MemoryError, match="no memory for an item"):
        run_in_team(work, threads, 2, 1)
    assert threads.run([lambda: 1, lambda: 2]) == [1, 2]
    threads.close()
