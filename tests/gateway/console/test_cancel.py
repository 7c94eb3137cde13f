"""``DELETE /console/requests``: an operator ends what somebody else sent."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest

from services.common.errors import FailedPrecondition, Unavailable
from services.gateway.console.cancelling import cancel_request
from tests.gateway.batch.requests import begin, ended, line, results
from tests.gateway.console.test_observer import connected
from tests.gateway.console.test_state import PROMPT, find, look, running
from tests.gateway.deployment import PATIENCE_S, eventually

LONG = {"prompt": PROMPT, "max_tokens": 1500}


def cancel(watched, request_id: str) -> httpx.Response:
    return httpx.delete(watched.url + "/console/requests", params={"id": request_id}, timeout=PATIENCE_S)


def is_at_rest(watched) -> bool:
    load = look(watched)["load"]
    return (load["running_sequences"], load["waiting_sequences"], load["in_use_pages"]) == (0, 0, 0)


def test_a_streams_client_is_told_behind_what_there_is(watched):
    body = LONG | {"ignore_eos": True, "stream": True, "n": 2}
    with httpx.stream("POST", watched.url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        request_id, lines = answer.headers["x-request-id"], answer.iter_lines()
        first = next(each for each in lines if each.startswith("data:"))
        cancelled = cancel(watched, request_id)
        assert (cancelled.status_code, cancelled.json()) == (200, {"id": request_id, "samples": 2})
        events = [first, *(each for each in lines if each.startswith("data:"))]
    assert json.loads(events[0].removeprefix("data:"))["choices"]
    error = json.loads(events[-1].removeprefix("data:"))["error"]
    assert (error["type"], error["code"]) == ("cancelled_error", "cancelled_by_operator")
    eventually(lambda: is_at_rest(watched))
    assert find(look(watched), request_id) is None
    assert cancel(watched, request_id).status_code == 404  # it has ended
    assert watched.complete(prompt="x", max_tokens=2).status_code == 200


def test_who_waits_for_a_whole_answer_gets_499_and_does_not_send_it_again(watched):
    """Of a list of prompts one is cancelled: the answer has all of them or none."""

    def ids() -> list[str]:
        return [each["id"] for each in look(watched)["schedule"]["requests"]]

    with watched.sdk() as client, ThreadPoolExecutor(1) as pool:
        ask = client.with_options(max_retries=2).completions.create
        asked = {"prompt": [PROMPT, PROMPT[1:]], "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        answer = pool.submit(ask, model="tokasaurus-builtin", **asked)
        eventually(lambda: len(ids()) == 2)
        assert cancel(watched, ids()[0]).status_code == 200
        with pytest.raises(openai.APIStatusError) as raised:
            answer.result(PATIENCE_S)
    assert (raised.value.status_code, raised.value.code) == (499, "cancelled_by_operator")
    eventually(lambda: is_at_rest(watched))


def test_a_line_of_a_batch_ends_with_an_error_and_the_others_go_on(watched):
    with watched.sdk() as sdk:
        batch = begin(sdk, [line("long", **LONG, ignore_eos=True), *(line(f"r{n}") for n in range(5))])

        def long_one() -> list[str]:
            requests = look(watched)["schedule"]["requests"]
            return [each["id"] for each in requests if each["max_tokens"] == LONG["max_tokens"]]

        eventually(lambda: len(long_one()) == 1)
        [request_id] = long_one()
        assert cancel(watched, request_id).status_code == 200
        done = ended(sdk, batch)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 5, 1)
        [told] = results(sdk, done.error_file_id)
    assert (told["custom_id"], told["response"]["status_code"]) == ("long", 499)
    assert told["response"]["body"]["error"]["code"] == "cancelled_by_operator"
    assert told["response"]["request_id"] == request_id
    eventually(lambda: is_at_rest(watched))


def test_what_is_not_there_cannot_be_cancelled(watched):
    with running(watched) as request_id:
        for wrong, status in (("nobody", 404), ("x" * 5000, 404), (request_id + "x", 404), ("", 400)):
            refused = cancel(watched, wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, "id")
        assert httpx.get(watched.url + "/console/requests", timeout=PATIENCE_S).status_code == 405
        eventually(lambda: (seen := find(look(watched), request_id)) and seen["running"] == 1)


@pytest.mark.parametrize(
    ("stub", "error"), [("none", Unavailable), ("old", FailedPrecondition), ("closed", Unavailable)]
)
async def test_a_scheduler_that_cannot_be_asked(stub, error):
    """Not there, older than the call, or its connection ends."""
    async with asyncio.timeout(20), connected() as (_, channel, replica):
        if stub == "none":
            replica.stub = None
        if stub == "closed":
            await channel.close()
        with pytest.raises(error):
            await cancel_request(SimpleNamespace(replicas=(replica,), cancel_queued=lambda _: 0), "x")
