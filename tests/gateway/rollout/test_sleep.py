"""Sleep over HTTP, at two schedulers."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S, eventually
from tests.gateway.rollout.conftest import get, post, reasons, streamed, texts
from tests.gateway.rollout.test_routes import LONG
from tests.quick import quick_if


@pytest.fixture(autouse=True)
def woken(trained):
    """A test leaves nothing asleep."""
    yield
    post(trained, "/wake_up")


def is_sleeping(deployment) -> bool:
    return get(deployment, "/is_sleeping")["is_sleeping"]


CALLS = {
    "vllm": (("/sleep?level=1&mode=keep", {}), [("/wake_up", {})]),
    "vllm tags": (("/sleep?level=2&mode=keep", {}), [("/wake_up?tags=weights&tags=kv_cache", {})]),
    "vllm parts": (("/sleep?mode=keep", {}), [("/wake_up?tags=weights", {}), ("/wake_up?tags=kv_cache", {})]),
    "sglang": (("/release_memory_occupation", {}), [("/resume_memory_occupation", {})]),
    "sglang tags": (
        ("/release_memory_occupation", {"json": {"tags": ["kv_cache", "weights"]}}),
        [
            ("/resume_memory_occupation", {"json": {"tags": ["weights"]}}),
            ("/resume_memory_occupation", {"json": {"tags": ["cuda_graph"]}}),
            ("/resume_memory_occupation", {"json": {"tags": ["kv_cache", "cuda_graph"]}}),
        ],
    ),
}


@pytest.mark.parametrize("api", quick_if(lambda api: api == "vllm parts", CALLS))
def test_kept_requests_continue_as_if_there_had_been_no_sleep(trained, api):
    body = LONG | {"max_tokens": 100, "n": 4}
    alone = texts(streamed(trained, "/v1/completions", body))
    (path, given), wakes = CALLS[api]

    def sleep_and_wake(_) -> None:
        post(trained, path, **given)
        eventually(lambda: trained.metric("toka_sleeping") == 2)
        assert httpx.get(f"{trained.url}/health", timeout=PATIENCE_S).status_code == 200
        later = pool.submit(trained.complete, prompt="Hi", max_tokens=2)
        for wake, tags in wakes:
            assert is_sleeping(trained)
            post(trained, wake, **tags)
        assert later.result(PATIENCE_S).status_code == 200

    with ThreadPoolExecutor(1) as pool:
        assert texts(streamed(trained, "/v1/completions", body, sleep_and_wake)) == alone
    assert not is_sleeping(trained)


def test_aborted_requests_end_with_their_tokens(trained):
    def sleep(_) -> None:
        answer = post(trained, "/sleep").json()
        assert answer == {"status": "sleeping", "aborted_samples": 3, "released_bytes": 4000}

    assert reasons(streamed(trained, "/v1/completions", LONG | {"n": 3}, sleep)) == ["abort"] * 3
    assert post(trained, "/wake_up?tags=weights").json() == {"status": "sleeping", "asleep": ["kv_cache"]}
    assert post(trained, "/wake_up").json() == {"status": "awake", "asleep": []}


def test_weights_are_replaced_between_two_calls_of_wake_up(trained):
    post(trained, "/sleep?level=2")
    update = {"model_path": "/weights/1", "weight_version": "v1"}
    refused = httpx.post(f"{trained.url}/update_weights_from_disk", json=update, timeout=PATIENCE_S)
    assert (refused.status_code, "weights are asleep" in refused.text) == (409, True)
    post(trained, "/wake_up?tags=weights")
    post(trained, "/update_weights_from_disk", json=update)
    assert is_sleeping(trained)
    post(trained, "/wake_up?tags=kv_cache")
    [choice] = trained.complete(prompt="Hi", max_tokens=3, ignore_eos=True).json()["choices"]
    assert choice["weights"] == [{"version": "v1", "tokens": 3}]


@pytest.mark.parametrize(
    ("path", "given", "field"),
    [
        ("/sleep?level=0", {}, "level"),
        ("/sleep?level=x", {}, "level"),
        ("/sleep?mode=stop", {}, "mode"),
        ("/wake_up?tags=weights&tags=scheduling", {}, "tags"),
        ("/release_memory_occupation", {"json": {"tags": ["cuda_graph"]}}, "tags.0"),
        ("/resume_memory_occupation", {"json": {"tags": ["kv_cache", "all"]}}, "tags.1"),
    ],
)
def test_a_wrong_call_names_the_field(trained, path, given, field):
    refused = httpx.post(trained.url + path, timeout=PATIENCE_S, **given)
    assert (refused.status_code, refused.json()["error"]["param"].startswith(field.split(".")[0])) == (400, True)
    assert not is_sleeping(trained)
