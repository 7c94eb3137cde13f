"""Pages that every layer's window has left behind are released, and nothing reads them again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.plan.types import WorkerLimits
from services.scheduler.core.memory.pages import PagePool
from services.scheduler.core.memory.prefix_tree import PrefixTree
from services.scheduler.core.request import AdmissionMode, Priority
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import Driver, check_all
from tests.scheduler.core.test_prefix_tree import PAGE, check, run, texts

SHAPE = FakeShape(vocab_size=62, page_size=4, page_count=16, max_slots=4, max_tokens_per_step=64,
                  max_context_tokens=64, first_token=2, window_tokens=8)  # fmt: skip


def shape_with(**values) -> FakeShape:
    return FakeShape(**{name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__} | values)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 100))
def test_a_page_is_left_behind_once_no_position_of_it_is_attended_to(window, page_size, computed):
    limits = WorkerLimits(page_size, 100, 1, 1, 200, 10, window_tokens=window)
    attended = range(max(0, computed + 1 - window), computed + 1)
    left = int(limits.pages_left_behind(np.array([computed]))[0])
    assert left == attended[0] // page_size
    assert attended[-1] // page_size + 1 - left <= limits.window_pages


def test_sequences_longer_than_the_pool_together_run_together():
    driver = Driver(SHAPE)
    for token in range(4):
        driver.submit([2 + token] * 4, max_tokens=56)  # 15 pages at its end, of which it needs three at once
    driver.step()
    assert driver.core.state.pool.slots.running == 4
    check_all(driver)
    assert driver.model.peak_pages <= 16


def test_a_prompt_beyond_the_window_with_an_answer_of_one_token_is_forecast():
    driver = Driver(SHAPE, steps_ahead=1)
    driver.submit([2] * 4, max_tokens=56)  # 15 pages at its end, so the forecast decides about the next request
    driver.step()
    short = driver.submit([3] * 40, max_tokens=1)
    driver.step()
    assert driver.seen[short].finish is not None
    check_all(driver)


@pytest.mark.parametrize("window", [0, 8])
def test_pages_of_a_long_prompt_are_released_between_its_chunks(window):
    driver = Driver(shape_with(max_tokens_per_step=8, window_tokens=window), steps_ahead=2, prefix_caching=False)
    driver.submit(list(range(2, 50)), max_tokens=2)
    held = []
    for _ in range(6):
        driver.plan()
        driver.answer()
        held.append(driver.core.state.pool.pages.in_use)
    assert held == ([12, 12, 10, 8, 6, 4] if window else [12] * 6)
    check_all(driver)


def test_samples_share_a_prompt_beyond_the_window():
    driver = Driver(SHAPE)
    first = driver.submit([2 + index % 50 for index in range(31)], n=4, max_tokens=20)
    check_all(driver)
    assert driver.seen[first + 1].finish.cached_prompt_tokens == 30
    assert driver.model.prefilled_tokens == 31 + 3


def test_a_prefix_whose_first_pages_were_reused_is_not_found():
    prompt = [2 + index % 50 for index in range(40)]
    driver = Driver(shape_with(page_count=20))
    driver.submit(prompt, max_tokens=20)
    driver.step()
    again = driver.submit(prompt, max_tokens=2)  # the first pages are cached, though the first sequence left them
    driver.step()
    assert driver.core.state.pool.slots.running == 2
    for token in (50, 51):  # these need all pages that no sequence holds
        driver.submit([token] * 40, max_tokens=2)
    driver.submit(prompt, max_tokens=2, request_id="last")
    check_all(driver)
    assert driver.seen[again].finish.cached_prompt_tokens == 36


def test_a_preempted_sequence_keeps_the_tokens_of_pages_that_others_use():
    driver = Driver(shape_with(page_count=12, max_slots=2, max_context_tokens=48), mode=AdmissionMode.PREDICTED)
    for number in range(2):
        driver.submit([2 + number] * 4, max_tokens=40, priority=Priority.LOW)
    for _ in range(30):
        driver.step()
    for number in range(2):
        driver.submit([10 + number] * 20, max_tokens=20)
    check_all(driver)
    assert driver.core.state.queue.counters.yields


def test_a_sequence_that_loses_its_worker_far_beyond_its_window_goes_on():
    driver = Driver(SHAPE)
    driver.submit([2, 3, 4], max_tokens=50)
    for _ in range(40):
        driver.step()
    driver.lose_worker()
    check_all(driver)


@given(st.lists(st.tuples(texts, st.integers(0, 8), st.booleans()), max_size=16), st.data())
def test_pages_that_are_left_behind_can_be_taken_and_no_others(sequences, data):
    pool = PagePool(24, PAGE)
    tree = PrefixTree(pool)
    running: list[tuple[int, int, list[int]]] = []  # node, first page held, pages of the path
    for tokens, first, ends in sequences:
        if pool.available < len(tokens) // PAGE:
            continue
        node = run(tree, pool, tokens, "", step=1)
        path, first = tree.path(node).tolist(), min(first, int(tree.depth[node]))
        assert pool.tokens[path].ravel().tolist() == tokens[: len(path) * PAGE].tolist()
        at = 0
        while at < first:  # in one move or several
            end = data.draw(st.integers(at + 1, first))
            tree.leave_behind(node, at, end)
            at = end
        running.append((node, first, path))
        if ends:
            node, first, _ = running.pop(data.draw(st.integers(0, len(running) - 1)))
            tree.detach(node, first)
        # A node without holders may lose its number, so the sequence must not name it any more.
        running = [each for each in running if each[1] < len(each[2])]
        held = {page for _, first, path in running for page in path[first:]}
        assert pool.in_use == len(held)
        taken = pool.take(data.draw(st.integers(0, pool.available)))
        assert not held & set(taken.tolist())
        pool.give(taken)
        check(tree, pool)
    for node, first, _ in running:
        tree.detach(node, first)
    assert pool.in_use == 0
    assert len(pool.take(pool.size)) == pool.size
