"""Batches of API keys that have limits."""

import contextlib
import time

import pytest

from tests.gateway.access.conftest import Guarded, start
from tests.gateway.batch.requests import begin, ended, line, results
from tests.gateway.deployment import eventually

LONG = {"prompt": [20] * 8, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Its keys may be changed, and its steps take a while."""
    made = start(tmp_path_factory.mktemp("guarded"), step_ms=5)
    yield made
    made.running.stop()


def running(guarded: Guarded) -> float:
    return guarded.metric("toka_num_requests_running")


@pytest.mark.slow
def test_lines_run_while_there_is_room_and_requests_of_their_key_go_first(guarded):
    endless = LONG | {"max_tokens": 1900, "stream": True}
    with guarded.sdk("two-at-once") as sdk, guarded.http("two-at-once") as http:
        batch = begin(sdk, [line(f"r{n}", **LONG) for n in range(8)])
        eventually(lambda: running(guarded) == 2)
        with contextlib.ExitStack() as streams:
            for _ in range(2):
                answer = streams.enter_context(http.stream("POST", "/v1/completions", json=endless))
                assert answer.status_code == 200
            assert http.post("/v1/completions", json=LONG).status_code == 429
            eventually(lambda: running(guarded) == 2)  # no line any more
        most = 0

        def is_done() -> bool:
            nonlocal most
            most = max(most, running(guarded))
            return sdk.batches.retrieve(batch.id).status == "completed"

        eventually(is_done)
        assert most <= 4  # what was cancelled may be among those of a step that is under way
        done = sdk.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (8, 0)
        told = results(sdk, done.output_file_id)
    assert [each["custom_id"] for each in told] == [f"r{n}" for n in range(8)]
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in told} == {400}


@pytest.mark.slow
def test_a_request_gets_the_only_place_of_its_key_from_a_line_which_begins_anew(guarded):
    with guarded.sdk("one-at-once") as sdk, guarded.http("one-at-once") as http:
        batch = begin(sdk, [line("long", **LONG), line("short")])
        for _ in range(3):  # whichever line is running, and however often
            eventually(lambda: running(guarded) == 1)
            answer = http.post("/v1/completions", json=LONG | {"max_tokens": 5})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 5
            assert answer.headers["x-ratelimit-limit-requests"] == "1"
        with http.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 1900, "stream": True}) as answer:
            assert answer.status_code == 200
            assert http.post("/v1/completions", json=LONG).status_code == 429  # a request makes no way
            assert sdk.batches.retrieve(batch.id).status == "in_progress"
        done = ended(sdk, batch)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 0)
        told = {each["custom_id"]: each["response"]["body"]["usage"] for each in results(sdk, done.output_file_id)}
    assert {name: usage["completion_tokens"] for name, usage in told.items()} == {"long": 400, "short": 3}
    eventually(lambda: running(guarded) == 0)


def test_a_key_whose_lines_wait_keeps_nobody_elses_from_running(guarded):
    with guarded.sdk("two-at-once") as crowded, guarded.sdk("team") as others:
        many = begin(crowded, [line(f"r{n}", **LONG | {"max_tokens": 1900}) for n in range(150)])
        eventually(lambda: running(guarded) == 2)
        assert ended(others, begin(others, [line(f"r{n}") for n in range(150)])).request_counts.completed == 150
        assert crowded.batches.retrieve(many.id).request_counts.completed < 100
        crowded.batches.cancel(many.id)
        assert ended(crowded, many).status == "cancelled"
    eventually(lambda: running(guarded) == 0)


@pytest.mark.slow
def test_lines_that_wait_for_tokens_leave_their_places_to_others(tmp_path):
    guarded = start(tmp_path, batch_concurrency=2)
    try:
        with guarded.sdk("thrifty") as poor, guarded.sdk("team") as others:
            body = LONG | {"max_tokens": 280}  # it waits for a full bucket
            waiting = begin(poor, [line(f"r{n}", **body) for n in range(8)])
            eventually(lambda: poor.batches.retrieve(waiting.id).request_counts.completed == 1)
            assert ended(others, begin(others, [line(f"r{n}") for n in range(20)])).request_counts.completed == 20
            assert poor.batches.retrieve(waiting.id).request_counts.completed < 8
            poor.batches.cancel(waiting.id)
            assert ended(poor, waiting).status == "cancelled"
    finally:
        guarded.running.stop()


@pytest.mark.slow
def test_lines_take_their_keys_tokens_wait_for_more_and_fail_alone_when_there_never_will_be_enough(guarded):
    """Of the 6,000 tokens half are left to requests, so that the last line waits for some."""
    began = time.monotonic()
    with guarded.sdk("saver") as sdk, guarded.http("saver") as http:
        body = LONG | {"n": 3}  # 1,208 tokens
        lines = [line(f"r{n}", **body) for n in range(3)]
        done = ended(sdk, begin(sdk, [*lines, line("never", **LONG | {"n": 16})]))
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 3, 1)
        [never] = results(sdk, done.error_file_id)
        assert never["response"]["status_code"] == 400
        assert never["response"]["body"]["error"]["param"] == "max_tokens"
        answer = http.post("/v1/completions", json=LONG | {"max_tokens": 1})
        assert answer.status_code == 200  # half of them were left
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert left <= 6000 - 3 * 1208 + (time.monotonic() - began) * 100


def test_lines_of_a_key_that_is_taken_away_fail_and_those_that_run_go_on(guarded):
    def asked() -> int:
        with guarded.http("two-at-once") as http:
            return http.get("/v1/models").status_code

    with guarded.sdk("two-at-once") as sdk:
        batch = begin(sdk, [line(f"r{n}", **LONG) for n in range(12)])
        eventually(lambda: running(guarded) == 2)
        guarded.keys.write(*(name for name in guarded.keys.keys if name != "two-at-once"))
        eventually(lambda: asked() == 401)
        eventually(lambda: running(guarded) == 0)
        guarded.keys.write(*guarded.keys.keys)
        eventually(lambda: asked() == 200)
        done = ended(sdk, batch)
        assert done.status == "completed"
        assert done.request_counts.completed >= 2
        assert done.request_counts.failed >= 1
        refused = results(sdk, done.error_file_id)
    assert {each["response"]["status_code"] for each in refused} == {401}
    assert {each["response"]["body"]["error"]["code"] for each in refused} == {"invalid_api_key"}
