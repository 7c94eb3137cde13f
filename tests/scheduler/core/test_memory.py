"""What a request held is free when it has ended, without the collector, which a service runs seldom."""

import gc
import random
import weakref

import numpy as np
import pytest

from services.common.errors import Overloaded
from services.common.plan.types import SamplingSettings
from services.scheduler.core.request import Request
from tests.fakes.model import FakeShape
from tests.scheduler.core.driver import SINK, Driver

SHAPE = FakeShape(
    vocab_size=62, page_size=4, page_count=120, max_slots=24, max_tokens_per_step=48, max_context_tokens=128,
    first_token=2,
)  # fmt: skip


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_no_request_outlives_its_last_sample(without_collector):
    driver, chance, requests = Driver(SHAPE), random.Random(1), []
    driver.submit([5] * 10, max_tokens=100, deadline_ms=10)  # first to be due, and runs for long
    for _ in range(40):
        kinds = ({}, {"n": 3}, {"stop": ("abc",)}, {"deadline_ms": 1}, {"deadline_ms": 1000}, {"cache_salt": "own"})
        for fields in kinds:
            prompt = [chance.randrange(2, 60) for _ in range(chance.randrange(1, 20))]
            handle = driver.submit(prompt, max_tokens=chance.randrange(1, 30), **fields)
            requests.append(weakref.ref(driver.requests.pop(handle)))
            if chance.random() < 0.2:
                driver.cancel(handle)
            driver.step()
        driver.core.end_overdue(2)
        driver.collect()
    held = [request() for request in requests if request() is not None]
    assert len(held) <= driver.core.live(SINK)
    assert all(request.unfinished for request in held)
    del held
    driver.run()
    assert not [request for request in requests if request() is not None]


def test_a_refused_request_is_not_kept(without_collector):
    driver = Driver(SHAPE, max_queued=1)
    driver.submit([5], max_tokens=5)
    request = Request("refused", np.array([5], np.uint32), SamplingSettings(), sink=SINK, handle=7, n=1)
    with pytest.raises(Overloaded):
        driver.core.submit(request, 1)
    known = weakref.ref(request)
    del request
    assert known() is None


def test_a_lost_worker_leaves_nothing_behind(without_collector):
    driver = Driver(SHAPE)
    driver.submit([5] * 30, n=3, max_tokens=50)
    for _ in range(10):
        driver.step()
    state = driver.core.state
    known = [weakref.ref(each) for each in (state.pool.tree, state.pool.pages, state.pool.slots)]
    del state
    driver.lose_worker()
    driver.run()
    assert not [each for each in known if each() is not None]
