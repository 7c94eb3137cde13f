"""New weights over HTTP, at two schedulers, whose fake workers have the weights N in ``/weights/N``."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import grpc
import httpx
import pytest

from services.common.errors import Unavailable
from services.gateway.rollout import control
from tests.fakes.model import FakeShape, continuation
from tests.gateway.deployment import PATIENCE_S, eventually, eventually_async
from tests.gateway.rollout.conftest import get, post, running, streamed
from tests.gateway.rollout.schedulers import Schedulers
from tokasaurus.scheduler.v1 import control_pb2 as c
from tokasaurus.scheduler.v1 import observe_pb2 as o

SEEDED = {"prompt": [40, 41, 42], "temperature": 1.0, "seed": 5, "ignore_eos": True, "return_token_ids": True}


def update(deployment, number: int, **more) -> dict:
    return post(deployment, "/update_weights_from_disk", json={"model_path": f"/weights/{number}"} | more).json()


def expected(weights: int, count: int, before=()) -> list[int]:
    """The tokens of sample 0, as its request's seed is 5."""
    return continuation(FakeShape(), [*SEEDED["prompt"], *before], count, seed=5, weights=weights)


def test_an_update_reaches_all_workers_and_names_its_version(trained):
    told = update(trained, 1, weight_version="step-1")
    assert (told["success"], told["weight_version"]) == (True, "step-1")
    assert get(trained, "/get_weight_version") == {"weight_version": "step-1"}
    schedulers = get(trained, "/weights?checksums=true")["schedulers"]
    assert [(each["version"], each["directory"]) for each in schedulers] == [("step-1", "/weights/1")] * 2
    assert [list(worker["checksums"]) for each in schedulers for worker in each["workers"]] == [["norm"]] * 2
    [choice] = trained.complete(**SEEDED, max_tokens=8).json()["choices"]
    assert choice["weights"] == [{"version": "step-1", "tokens": 8}]
    assert choice["token_ids"] == expected(1, 8)


def test_running_samples_continue_with_the_new_weights(trained):
    update(trained, 2, weight_version="2")
    body = SEEDED | {"max_tokens": 200}
    events = streamed(trained, "/v1/completions", body, lambda _: update(trained, 3, weight_version="3"))
    old, new = events[-1]["choices"][0]["weights"]
    assert (old["version"], new["version"], old["tokens"] + new["tokens"]) == ("2", "3", 200)
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens[: old["tokens"]] == expected(2, old["tokens"])
    assert tokens[old["tokens"] :] == expected(3, new["tokens"], tokens[: old["tokens"]])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_chunk_of_a_stream_names_the_weights(trained, path):
    update(trained, 4, weight_version="4")
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": True}
    choices = [choice for event in streamed(trained, path, body) for choice in event["choices"]]
    assert [choice["weights"] for choice in choices if "weights" in choice] == [[{"version": "4", "tokens": 5}]]
    assert choices[-1]["finish_reason"] == "length"


def test_updates_at_once_run_one_after_the_other(trained):
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            told = [each["weight_version"] for each in pool.map(lambda number: update(trained, number), range(1, 5))]
            assert told == [f"/weights/{number}" for number in range(1, 5)]
            assert len({each["version"] for each in get(trained, "/weights")["schedulers"]}) == 1


def test_an_update_may_end_all_requests(trained):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(trained.complete, **SEEDED, max_tokens=1500)
        eventually(lambda: running(trained) == 1)
        update(trained, 5, abort_all_requests=True)
        assert answer.result(PATIENCE_S).json()["choices"][0]["finish_reason"] == "abort"
    assert get(trained, "/get_weight_version") == {"weight_version": "/weights/5"}


def test_an_update_during_a_pause_may_end_all_requests(trained):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(trained.complete, **SEEDED, max_tokens=1500)
        eventually(lambda: running(trained) == 1)
        post(trained, "/pause?mode=keep")
        update(trained, 1, abort_all_requests=True)
        assert answer.result(PATIENCE_S).json()["choices"][0]["finish_reason"] == "abort"
    assert get(trained, "/is_paused") == {"is_paused": True}


def test_an_update_during_a_pause_does_not_end_it(trained):
    post(trained, "/pause?mode=keep")
    update(trained, 6)
    assert get(trained, "/is_paused") == {"is_paused": True}
    post(trained, "/resume")
    assert trained.complete(**SEEDED, max_tokens=4).json()["choices"][0]["token_ids"] == expected(6, 4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model_path": "/nowhere"}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": 3}, "model_path"),
        ({}, "model_path"),
        (None, "model_path"),
        ({"model_path": "/weights/1", "weight_version": ""}, "weight_version"),
    ],
)
def test_a_wrong_update_names_the_field_and_changes_nothing(trained, body, field):
    update(trained, 7)
    before = get(trained, "/weights")
    given = {} if body is None else {"json": body}
    refused = httpx.post(trained.url + "/update_weights_from_disk", timeout=PATIENCE_S, **given)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
    assert get(trained, "/weights") == before
    assert get(trained, "/is_paused") == {"is_paused": False}


class Scheduler:
    """A scheduler that is not paused. It writes down the calls, and its commits fail with ``error``."""

    def __init__(self, error: Exception | None) -> None:
        self.stub, self.address, self.error = self, "address", error
        self.calls: list[tuple[str, object]] = []

    def metadata(self) -> None:
        return None

    def __getattr__(self, method: str):
        async def call(request, metadata, timeout):
            self.calls.append((method, request))
            if method == "CommitWeights" and self.error is not None:
                raise self.error
            return {
                "StageWeights": c.StageWeightsResponse(update_id="u"),
                "GetLoad": o.GetLoadResponse(),
                "Pause": c.PauseResponse(pause=7),
                "CommitWeights": c.CommitWeightsResponse(),
            }.get(method)

        return call


@pytest.mark.parametrize("error", [None, grpc.aio.UsageError()])
async def test_an_update_ends_only_its_own_pauses_and_leaves_nothing_staged(error):
    scheduler = Scheduler(error)
    fleet = SimpleNamespace(replicas=[scheduler], updating=asyncio.Lock())
    with nullcontext() if error is None else pytest.raises(Unavailable):
        await control.update_weights(fleet, "/weights/1", None, "keep")
    assert ("Resume", c.ResumeRequest(pause=7)) in scheduler.calls
    assert [request.limit_ns > 0 for method, request in scheduler.calls if method == "Pause"] == [True]
    assert (("DiscardWeights", c.DiscardWeightsRequest(update_id="u")) in scheduler.calls) is (error is not None)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_an_update_leaves_the_pause_of_a_scheduler_beside_one_that_restarted(mode):
    async with Schedulers.running() as schedulers:
        [fleet] = schedulers.fleets
        restarted = fleet.replicas[1]
        before = restarted.scheduler_id
        await control.pause(fleet, "keep")
        await schedulers.stop(1)
        await schedulers.start(1)
        await eventually_async(lambda: restarted.scheduler_id != before and restarted.ready)
        await control.update_weights(fleet, "/weights/1", None, mode)
        assert schedulers.versions == ["/weights/1"] * 2
        assert [schedulers.is_paused(index) for index in range(2)] == [True, False]


def test_of_updates_at_the_same_time_one_succeeds_and_generation_continues(trained):
    def attempt(number: int) -> int:
        body = {"model_path": f"/weights/{number}"}
        return httpx.post(trained.url + "/update_weights_from_disk", json=body, timeout=PATIENCE_S).status_code

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(attempt, range(11, 15)))
    assert set(statuses) <= {200, 409}
    assert get(trained, "/is_paused") == {"is_paused": False}
    assert trained.complete(**SEEDED, max_tokens=4).status_code == 200
