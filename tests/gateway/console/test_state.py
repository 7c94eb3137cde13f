"""``/console/state`` of a deployment that works."""

import asyncio
import time
from contextlib import contextmanager

import httpx

from tests.gateway.deployment import PATIENCE_S, eventually

PROMPT = [40 + index % 500 for index in range(43)]


def look(watched) -> dict:
    """The scheduler's part, as of now: what was told before is not told again."""
    asked_at = time.time()
    while (state := httpx.get(watched.url + "/console/state", timeout=PATIENCE_S).json())["at"] < asked_at:
        time.sleep(0.05)
    (replica,) = (each for each in state["replicas"] if each["address"] == watched.scheduler_address)
    return replica


@contextmanager
def running(watched, **fields):
    """A stream that was accepted: its request's id. It is left, and so ends, behind the block."""
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True} | fields
    url = watched.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        yield answer.headers["x-request-id"]


def find(replica: dict, request_id: str) -> dict | None:
    requests = replica["schedule"]["requests"]
    return next((each for each in requests if each["id"] == request_id), None)


def test_a_request_is_shown_with_its_expected_end_until_it_is_left(watched):
    with running(watched, n=3, priority=-1) as request_id:
        eventually(lambda: (seen := find(look(watched), request_id)) and seen["running"] == 3)
        replica = look(watched)
        seen = find(replica, request_id)
        assert (seen["prompt_tokens"], seen["max_tokens"], seen["priority"]) == (43, 1500, "high")
        assert (seen["waiting"], seen["finished"]) == (0, 0)
        assert 0 <= seen["generated_tokens"] < 4500
        assert replica["load"]["running_sequences"] == 3
        assert replica["load"]["in_use_pages"] > 0
        curve = replica["schedule"]["curve"]
        assert curve["total_pages"] == replica["load"]["total_pages"] == 1024
        assert max(curve["pages"]) >= replica["load"]["in_use_pages"]
        assert (curve["steps"][0], curve["pages"][-1]) == (0, 0)  # in the end nothing is left
        assert len(curve["steps"]) == len(curve["pages"]) <= 300
        eventually(lambda: look(watched)["schedule"]["step_seconds"])
        replica = look(watched)
        seen = find(replica, request_id)
        assert 0 <= seen["start_s"] <= seen["finish_s"]
        assert seen["finish_s"] <= 1600 * replica["schedule"]["step_seconds"]
        before = seen["generated_tokens"]
        eventually(lambda: find(look(watched), request_id)["generated_tokens"] > before)
        eventually(lambda: (plan := look(watched)["plan"]) and plan["sequences"] >= 3)
    eventually(lambda: find(look(watched), request_id) is None)
    eventually(lambda: look(watched)["load"]["running_sequences"] == 0)


def test_the_figures_are_those_of_the_metrics(watched):
    assert watched.complete(prompt="One, two,", max_tokens=7).status_code == 200
    eventually(lambda: look(watched)["load"]["running_sequences"] == 0)
    load = look(watched)["load"]
    pairs = {
        "toka_generation_tokens_total": load["counters"]["generated_tokens"],
        "toka_prompt_tokens_total": load["counters"]["prompt_tokens"],
        "toka_steps_total": load["counters"]["steps"],
        "toka_kv_pages_cached": load["cached_pages"],
        "toka_kv_pages_free": load["free_pages"],
    }
    eventually(lambda: all(watched.metric(name) == value for name, value in pairs.items()))


def test_a_scheduler_that_is_not_there_is_shown_with_the_reason(watched, nobody):
    state = httpx.get(watched.url + "/console/state", timeout=PATIENCE_S).json()
    (absent,) = (each for each in state["replicas"] if each["address"] == nobody)
    assert not absent["ready"]
    assert absent["reason"]
    assert state["gateway"]["ready"]
    assert state["gateway"]["reason"] is None


async def test_many_viewers_cost_as_much_as_one(watched):
    async with httpx.AsyncClient(base_url=watched.url, timeout=PATIENCE_S) as client:
        began_at = time.monotonic()
        answers = await asyncio.gather(*(client.get("/console/state") for _ in range(60)))
        took = time.monotonic() - began_at
    moments = {answer.json()["at"] for answer in answers}
    assert len(moments) <= 2 + took / 0.5
    assert len(moments) < 60


def test_no_prompt_and_no_answer_is_told(watched):
    with running(watched, prompt="a very secret prompt", return_token_ids=True) as request_id:
        eventually(lambda: find(look(watched), request_id) is not None)
        text = httpx.get(watched.url + "/console/state", timeout=PATIENCE_S).text
    assert "secret" not in text
    assert "token_ids" not in text
