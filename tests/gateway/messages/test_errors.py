"""Anthropic's errors through its SDK, and keys in its headers."""

import anthropic
import httpx
import pytest
from anthropic.types import ErrorResponse

from services.common.errors import Overloaded, Unavailable
from services.gateway.anthropic.errors import to_body, to_response
from tests.gateway.access.conftest import start
from tests.gateway.deployment import PATIENCE_S
from tests.gateway.messages.conftest import sdk_of
from tests.gateway.messages.test_create import WEATHER, created, saying

SCOPE = {"path": "/v1/messages", "headers": []}


def error_of(response: httpx.Response, status: int) -> dict:
    """The error in ``response``, which has the form that the SDK's types say."""
    assert response.status_code == status, response.text
    document = response.json()
    ErrorResponse.model_validate(document)
    assert document["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return document["error"]


def post(deployment, body, path="/v1/messages", **headers) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"content-type": "application/json"} | headers
    return httpx.post(deployment.url + path, headers=headers, timeout=PATIENCE_S, **content)


def test_a_wrong_body_is_a_bad_request(client, name, claude):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        created(client, name, "Hi", max_tokens=0)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id.startswith("req")
    assert caught.value.error_code == "invalid_value"
    for body in (b"{", b"[]", {"messages": "Hi", "max_tokens": 1}, {"messages": [{"role": "user", "content": "Hi"}]}):
        assert error_of(post(claude, body), 400)["type"] == "invalid_request_error"
    assert "'max_tokens'" in error_of(post(claude, {"messages": [{"role": "user", "content": "Hi"}]}), 400)["message"]


def test_a_model_that_is_not_there(client):
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(model=" no such model ", **saying("Hi"), extra_body={"top_k": -7})
    assert caught.value.type == "invalid_request_error"


def test_errors_of_the_pipeline_have_the_names_of_this_api(claude, client, name):
    schema = {"type": "json_schema", "schema": {"type": "string", "pattern": "(?=a)"}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: the grammar") as caught:
        created(client, name, "Hi", output_config={"format": schema})
    assert "response_format" not in str(caught.value)
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        created(client, name, "Hi", tools=[WEATHER], tool_choice={"type": "tool", "name": "clock"})


def test_a_prompt_that_is_too_long_is_told_in_words_that_claude_code_knows(client, name):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        created(client, name, "word " * 5000)


def test_paths_and_methods(claude):
    assert error_of(httpx.get(f"{claude.url}/v1/messages"), 405)["type"] == "invalid_request_error"
    assert error_of(post(claude, {}, "/v1/messages/batches"), 404)["type"] == "not_found_error"
    version = {"anthropic-version": "2023-06-01"}
    assert error_of(httpx.get(f"{claude.url}/v1/models/none", headers=version), 404)["type"] == "not_found_error"
    assert "param" in httpx.get(f"{claude.url}/v1/models/none").json()["error"]


def test_statuses_and_types():
    full = Overloaded("the queue is full", retry_after_s=2)
    assert to_body(full, "req-1") == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "the queue is full",
            "details": {"error_code": "queue_full"},
        },
        "request_id": "req-1",
    }
    response = to_response(full, dict(SCOPE))
    assert (response.status_code, response.headers["retry-after"]) == (529, "2")
    limited = Overloaded("too many tokens", retry_after_s=2, reason="RATE_LIMIT_EXCEEDED")
    assert to_response(limited, dict(SCOPE)).status_code == 429
    assert to_body(limited, "req-1")["error"]["type"] == "rate_limit_error"
    assert to_response(Unavailable("loading"), dict(SCOPE)).status_code == 503


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    made = start(tmp_path_factory.mktemp("guarded"))
    yield made
    made.running.stop()


def test_a_key_comes_in_either_header(guarded):
    key = guarded.keys.keys["team"]
    for given in ({"api_key": key}, {"api_key": None, "auth_token": key}):
        with sdk_of(guarded.running, **given) as client:
            model = client.models.list().data[0].id
            assert client.messages.count_tokens(model=model, messages=saying("Hi")["messages"]).input_tokens
            assert created(client, model, "Hi", max_tokens=2).usage.output_tokens
    with sdk_of(guarded.running, api_key="tk-wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.type == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            created(client, model, "Hi")
    with sdk_of(guarded.running, api_key=guarded.keys.keys["boss"]) as client:
        with pytest.raises(anthropic.PermissionDeniedError) as caught:
            created(client, model, "Hi")
        assert caught.value.type == "permission_error"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"authorization": "Bearer tk-wrong", "x-api-key": "{key}"},
        {"authorization": "{key}", "x-api-key": "{key}"},
        {"authorization": "Bearer", "x-api-key": "{key}"},
        {"api-key": "{key}"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_without_a_right_key_nothing_runs(guarded, path, headers):
    accepted = guarded.metric("toka_request_params_n_count")
    own = {name: value.format(key=guarded.keys.keys["team"]) for name, value in headers.items()}
    assert error_of(post(guarded.running, saying("Hi"), path, **own), 401)["type"] == "authentication_error"
    assert guarded.metric("toka_request_params_n_count") == accepted


def test_a_key_has_its_limits_here_too(guarded):
    with sdk_of(guarded.running, api_key=guarded.keys.keys["thrifty"]) as client:
        model = client.models.list().data[0].id
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            created(client, model, "Hi", max_tokens=1000)
        created(client, model, "Hi", max_tokens=150, extra_body={"ignore_eos": True})
        with pytest.raises(anthropic.RateLimitError) as caught:
            created(client, model, "Hi", max_tokens=250)
    assert caught.value.type == "rate_limit_error"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_requests_are_counted_by_their_route(guarded):
    lines = httpx.get(guarded.admin_url + "/metrics", timeout=PATIENCE_S).text.splitlines()
    routes = [line for line in lines if line.startswith("toka_http_requests_total{")]
    for route in ("/v1/messages", "/v1/messages/count_tokens"):
        assert any(f'"{route}"' in line and '"200"' in line for line in routes)
