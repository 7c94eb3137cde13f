"""What logs show of requests: their ids, and prompts and answers only where that was asked for."""

import json

import httpx
import pytest

from services.common.config import GatewayConfig
from services.common.keys import hash_of
from tests.gateway.deployment import PATIENCE_S, Deployment, eventually

KEY = "a key that nobody else has got"
CANARY = "The parrot hides under the mattress."
LONG = " dollars" * 700


@pytest.fixture
def begin(tmp_path):
    begun = []

    def begin(**flags) -> Deployment:
        begun.append(Deployment(tmp_path, scheduler={"log_level": "DEBUG"}, gateway=flags))
        return begun[-1].wait_ready()

    yield begin
    for deployment in begun:
        deployment.stop()


def lines(deployment: Deployment, service: str, event: str) -> list[dict]:
    """The lines of the log for ``event`` that are complete now."""
    text = (deployment.directory / f"{service}.log").read_text()
    events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in events if line["event"] == event]


def logged(deployment: Deployment, event: str, *request_ids: str) -> list[dict]:
    """The gateway's line for ``event`` of each request, once all are written: a client may have its answer before."""

    def found() -> dict[str, dict]:
        return {line["request_id"]: line for line in lines(deployment, "gateway", event)}

    eventually(lambda: found().keys() >= set(request_ids))
    return [found()[request_id] for request_id in request_ids]


def test_the_callers_id_comes_back_and_is_logged(begin):
    deployment = begin()

    def ask(name: str, path: str = "/v1/completions", **body) -> httpx.Response:
        headers = {"x-request-id": name}
        return httpx.post(deployment.url + path, json=body, headers=headers, timeout=PATIENCE_S)

    answer = ask("caller-1", prompt="x", max_tokens=2)
    assert answer.headers["x-request-id"] == "caller-1"
    assert answer.json()["id"].startswith("cmpl-")
    assert ask("caller-2", prompt="x", max_tokens=-1).headers["x-request-id"] == "caller-2"
    assert ask("caller-3", "/nowhere").headers["x-request-id"] == "caller-3"
    assert ask("caller-4", prompt="x", max_tokens=2, stream=True).headers["x-request-id"] == "caller-4"
    eventually(lambda: len(lines(deployment, "gateway", "request with an id of its client")) == 4)
    told = lines(deployment, "gateway", "request with an id of its client")
    assert [line["client_request_id"] for line in told] == [f"caller-{number}" for number in range(1, 5)]
    assert told[0]["request_id"] == answer.json()["id"]
    for malformed in ("two words", "x" * 129):
        assert ask(malformed, prompt="x", max_tokens=2).headers["x-request-id"].startswith("cmpl-")


@pytest.mark.slow
def test_one_id_is_in_the_answer_its_header_and_all_logs_and_no_text_is_in_any(begin, tmp_path):
    (tmp_path / "keys.toml").write_text(f'[[keys]]\nname = "own"\nhash = "{hash_of(KEY)}"\n')
    deployment = begin(api_keys_file=tmp_path / "keys.toml", failover_seconds=0, log_level="DEBUG")
    ids = set()

    def ask(path: str, body: object, status: int) -> tuple[str, httpx.Response]:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(deployment.url + path, json=body, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == status
        ids.add(name := answer.headers["x-request-id"])
        return name, answer

    asked, answer = ask("/v1/completions", {"prompt": CANARY, "max_tokens": 4}, 200)
    assert asked == answer.json()["id"]
    chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 4, "stream": True}
    streamed, answer = ask("/v1/chat/completions", chat, 200)
    assert f'"id":"{streamed}"' in answer.text
    wrong, _ = ask("/v1/completions", {"prompt": CANARY, "max_tokens": -1}, 400)
    assert wrong.startswith("cmpl-")
    ask("/nowhere", {}, 404)
    name = httpx.post(deployment.url + "/v1/completions", json={}, timeout=PATIENCE_S).headers["x-request-id"]
    assert name not in ids  # 401
    name = httpx.get(deployment.url + "/health", timeout=PATIENCE_S).headers["x-request-id"]
    assert name.startswith("req-")
    eventually(lambda: len(lines(deployment, "scheduler", "request accepted")) == 2)
    accepted = [line["request_id"] for line in lines(deployment, "scheduler", "request accepted")]
    assert accepted == [asked, streamed]

    deployment.scheduler.stop()
    eventually(lambda: deployment.status("/ready") == 503)
    lost, _ = ask("/v1/completions", {"prompt": CANARY}, 503)
    assert logged(deployment, "not available", lost)
    assert len(ids) == 5
    assert "parrot" not in deployment.logs()
    assert KEY not in deployment.logs()


def test_who_asks_for_prompts_and_answers_finds_their_beginnings_in_the_log(begin):
    deployment = begin(log_prompts="T")
    whole = deployment.complete(prompt=[CANARY, LONG], max_tokens=4, n=2)
    assert whole.status_code == 200, whole.text
    name = whole.headers["x-request-id"]
    [asked], [answered] = (logged(deployment, event, name) for event in ("asked", "answered"))
    assert asked["prompts"] == [CANARY, LONG[:4096] + "..."]
    assert (asked["of"], asked["samples"], asked["level"]) == (2, 2, "info")
    assert answered["answers"] == [choice["text"] for choice in whole.json()["choices"]]

    with deployment.sdk().chat.completions.create(
        model=deployment.sdk().models.list().data[0].id,
        messages=[{"role": "user", "content": CANARY}],
        max_completion_tokens=8,
        stream=True,
    ) as stream:
        chunks = list(stream)
    [asked], [answered] = (logged(deployment, event, chunks[0].id) for event in ("asked", "answered"))
    assert CANARY in asked["prompts"][0]
    assert answered["answers"] == ["".join(chunk.choices[0].delta.content or "" for chunk in chunks)]


def test_prompts_are_not_asked_for_where_nobody_would_see_them():
    with pytest.raises(ValueError, match="log_prompts=T: has no effect with log_level=WARNING"):
        GatewayConfig(log_prompts=True, log_level="WARNING", scheduler_addresses=("127.0.0.1:1",))
