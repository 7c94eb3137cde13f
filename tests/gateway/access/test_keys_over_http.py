"""A gateway that asks for keys: who gets in, and what is whose."""

import io
import socket
import sqlite3
from itertools import islice
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from services.common.config import GatewayConfig
from services.gateway.http.guard import exposure
from tests.gateway.access.conftest import start
from tests.gateway.deployment import PATIENCE_S, Process, eventually

GET, POST, DELETE = "GET", "POST", "DELETE"
ROUTES = (
    (POST, "/v1/completions"),
    (POST, "/v1/chat/completions"),
    (POST, "/v1/chat/completions/batch"),
    (POST, "/v1/responses"),
    (GET, "/v1/responses/resp_1"),
    (DELETE, "/v1/responses/resp_1"),
    (GET, "/v1/responses/resp_1/input_items"),
    (POST, "/v1/responses/resp_1/cancel"),
    (POST, "/v1/responses/input_tokens"),
    (POST, "/v1/conversations"),
    (GET, "/v1/conversations/conv_1"),
    (POST, "/v1/conversations/conv_1"),
    (DELETE, "/v1/conversations/conv_1"),
    (POST, "/v1/conversations/conv_1/items"),
    (GET, "/v1/conversations/conv_1/items"),
    (GET, "/v1/conversations/conv_1/items/msg_1"),
    (DELETE, "/v1/conversations/conv_1/items/msg_1"),
    (GET, "/v1/chat/completions"),
    (GET, "/v1/chat/completions/chatcmpl-1"),
    (POST, "/v1/chat/completions/chatcmpl-1"),
    (DELETE, "/v1/chat/completions/chatcmpl-1"),
    (GET, "/v1/chat/completions/chatcmpl-1/messages"),
    (POST, "/v1/embeddings"),
    (GET, "/v1/models"),
    (GET, "/v1/models/tokasaurus-builtin"),
    (POST, "/tokenize"),
    (POST, "/detokenize"),
    (GET, "/version"),
    (POST, "/v1/files"),
    (GET, "/v1/files"),
    (GET, "/v1/files/file-1"),
    (GET, "/v1/files/file-1/content"),
    (DELETE, "/v1/files/file-1"),
    (POST, "/v1/batches"),
    (GET, "/v1/batches"),
    (GET, "/v1/batches/batch_1"),
    (POST, "/v1/batches/batch_1/cancel"),
    (GET, "/openapi.json"),
    (GET, "/docs"),
    (GET, "/nothing/here"),
    (POST, "/v1/completions/"),
)
WRONG = {
    "none": {},
    "wrong": {"authorization": "Bearer tk-wrong"},
    "empty": {"authorization": "Bearer"},
    "another scheme": {"authorization": "Basic dGVhbTp0ZWFt"},
    "another header": {"api-key": "tk-wrong"},
}
BODY = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "max_tokens": 2}


def stored(guarded) -> list[int]:
    """Rows of each table."""
    with sqlite3.connect(guarded.running.directory / "store" / "batches.db") as database:
        tables = ("toka_files", "toka_batches", "toka_responses", "toka_tries", "toka_conversations", "toka_chats")
        counts = [database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
    database.close()
    return counts


def test_without_a_right_key_every_route_refuses_and_nothing_is_touched(guarded):
    with guarded.http("team") as client:
        assert client.get("/v1/files").status_code == 200  # the store is open
    accepted, kept = guarded.metric("toka_requests_accepted_total"), stored(guarded)
    with guarded.http(None) as client:
        for method, path in ROUTES:
            body = {"json": BODY} if method == POST else {}
            for what, headers in WRONG.items():
                answer = client.request(method, path, headers=headers | {"idempotency-key": "k"}, **body)
                assert (answer.status_code, what) == (401, what), path
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"].startswith("Bearer")
            late = {"authorization": f"Bearer {guarded.keys.keys['late']}"}
            assert client.request(method, path, headers=late, **body).status_code == 401
            boss = {"authorization": f"Bearer {guarded.keys.keys['boss']}"}
            answer = client.request(method, path, headers=boss, **body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
    assert guarded.metric("toka_requests_accepted_total") == accepted
    assert stored(guarded) == kept


def test_with_a_right_key_no_route_refuses(guarded):
    with guarded.http("team") as client:
        for method, path in ROUTES:
            body = {"json": BODY} if method == POST else {}
            assert client.request(method, path, **body).status_code not in (401, 403), path


def test_the_sdk_gets_in_and_is_told_why_not(guarded):
    with guarded.sdk("team") as client:
        assert client.completions.create(model="tokasaurus-builtin", prompt="Hi", max_tokens=2).usage.total_tokens
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="tk-wrong").models.list()
    with guarded.sdk("boss") as client, pytest.raises(openai.PermissionDeniedError):
        client.models.list()


def test_who_is_refused_cannot_make_the_server_read(guarded):
    """A body is announced and never sent: the answer comes all the same, and no leave to send is given."""
    parts = urlsplit(guarded.running.url)
    with socket.create_connection((parts.hostname, parts.port), PATIENCE_S) as client:
        client.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 30000000\r\n\r\n"
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_two_authorizations_are_none(guarded):
    key = ("authorization", f"Bearer {guarded.keys.keys['team']}")
    answer = httpx.get(guarded.running.url + "/v1/models", headers=[key, ("authorization", "Bearer x")])
    assert answer.status_code == 401


def test_x_api_key_counts_where_there_is_no_authorization(guarded):
    key = guarded.keys.keys["team"]
    url = guarded.running.url + "/v1/models"
    assert httpx.get(url, headers={"x-api-key": key}).status_code == 200
    assert httpx.get(url, headers={"x-api-key": "tk-wrong", "authorization": f"Bearer {key}"}).status_code == 200
    assert httpx.get(url, headers={"x-api-key": key, "authorization": "Bearer tk-wrong"}).status_code == 401
    assert httpx.get(url, headers=[("x-api-key", key), ("x-api-key", key)]).status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [(GET, "/health%0a"), (GET, "/v1/models%0A"), (POST, "/v1/completions%0a"), (GET, "/v1/models/%00")],
)
def test_a_path_with_a_control_character_leads_nowhere(guarded, method, path):
    with guarded.http("team") as client:
        body = {"json": BODY} if method == POST else {}
        answer = client.request(method, path, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.slow
def test_what_is_the_matter_with_schedulers_and_the_store_is_for_operators(tmp_path):
    (tmp_path / "file").touch()
    made = start(tmp_path, failover_seconds=0, admin_port=0, store_dir=tmp_path / "file" / "store")
    try:
        made.running.scheduler.kill()
        with made.http("boss") as client:
            eventually(lambda: client.get("/ready").status_code == 503)
            assert made.running.scheduler_address in client.get("/ready").text
        with made.http("team") as client:
            answers = [client.post("/v1/completions", json=BODY), client.get("/v1/files")]
            together = client.post("/v1/chat/completions/batch", json=[BODY])
        assert [answer.status_code for answer in answers] == [503, 503]
        for answer in (*answers, together):
            assert "operators" in answer.text
            assert "127.0.0.1" not in answer.text
            assert str(tmp_path) not in answer.text
    finally:
        made.running.stop()


def test_probes_are_open_and_tell_little(guarded):
    with guarded.http(None) as client:
        assert client.get("/health").status_code == client.get("/ping").status_code == 200
        assert client.get("/ready").json() == {"ready": True, "reason": None}


def test_what_is_for_operators_has_a_port_of_its_own(guarded):
    with guarded.http("boss") as client:
        assert client.get("/metrics").status_code == 404
        assert "replicas" not in client.get("/ready").json()
    assert "replicas" in httpx.get(guarded.admin_url + "/ready").json()
    assert "toka_http_requests_total" in httpx.get(guarded.admin_url + "/metrics").text
    for path in ("/v1/models", "/v1/completions", "/openapi.json"):
        assert httpx.get(guarded.admin_url + path).status_code == 404


@pytest.fixture(scope="module")
def one_port(tmp_path_factory):
    """Operators ask where everybody asks. Its keys may be changed."""
    made = start(tmp_path_factory.mktemp("one-port"), admin_port=0)
    yield made
    made.running.stop()


def test_without_that_port_the_scope_admin_opens_it(one_port):
    with one_port.http("team") as client:
        assert client.get("/metrics%0a").status_code == 404
    for name, status, detail in ((None, 401, False), ("team", 403, False), ("boss", 200, True)):
        with one_port.http(name) as client:
            assert client.get("/metrics").status_code == status
            for path in ("/pause", "/resume", "/abort_requests", "/flush_cache", "/continue_generation"):
                assert client.post(path).status_code == status
            assert ("replicas" in client.get("/ready").json()) is detail


def test_keys_that_change_hold_at_once_and_are_in_no_log(one_port):
    log = one_port.running.directory / "gateway.log"
    with one_port.http("team") as team, one_port.http("other") as other:
        assert team.get("/v1/models").status_code == 200
        one_port.keys.write("other", "boss")
        eventually(lambda: team.get("/v1/models").status_code == 401)
        one_port.keys.path.write_text("[[keys]]")
        eventually(lambda: other.get("/v1/models") and "cannot reload the API keys" in log.read_text())
        assert other.get("/v1/models").status_code == 200
    one_port.keys.write(*one_port.keys.keys)
    logs = one_port.running.logs()
    for key in one_port.keys.keys.values():
        assert key not in logs


def test_a_gateway_does_not_start_with_a_wrong_file(tmp_path):
    process = Process(tmp_path / "log", "services.gateway", api_keys_file=tmp_path / "none.toml", port=0)
    assert process.wait() == 1
    assert "api_keys_file=" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        ({"host": "127.0.0.1"}, []),
        ({"host": "::1", "admin_port": 1}, []),
        ({"host": "0.0.0.0"}, ["without a key"]),
        ({"host": "::", "http_cert": "c", "http_key": "k"}, ["without a key"]),
        ({"host": "0.0.0.0", "api_keys_file": "f"}, ["unencrypted"]),
        ({"host": "0.0.0.0", "api_keys_file": "f", "http_cert": "c", "http_key": "k"}, []),
        ({"admin_port": 1, "admin_host": "0.0.0.0"}, ["admin_port=1"]),
    ],
)
def test_a_gateway_says_what_is_dangerous_about_its_addresses(given, reasons):
    said = exposure(GatewayConfig(**given))
    assert len(said) == len(reasons)
    assert all(reason in sentence for reason, sentence in zip(reasons, said, strict=True))


def test_files_and_batches_belong_to_the_key_that_made_them(guarded):
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}\n'
    )
    with guarded.sdk("team") as mine, guarded.sdk("other") as theirs:
        file = mine.files.create(file=io.BytesIO(line), purpose="batch")
        batch = mine.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        eventually(lambda: mine.batches.retrieve(batch.id).status == "completed")
        output = mine.batches.retrieve(batch.id).output_file_id
        assert b'"custom_id":"a"' in mine.files.content(output).read()
        for name in (file.id, output):
            for ask in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(name)
        for ask in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            theirs.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert not theirs.files.list().data
        assert not theirs.batches.list().data
        assert {each.id for each in mine.files.list().data} == {file.id, output}
        for lists in (theirs.files, theirs.batches):
            with pytest.raises(openai.BadRequestError):
                lists.list(after=file.id)


def test_stored_responses_belong_to_the_key_that_made_them(guarded):
    with guarded.sdk("team") as mine, guarded.sdk("other") as theirs:
        made = mine.responses.create(model="tokasaurus-builtin", input="Hi", max_output_tokens=2)
        for ask in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            theirs.responses.create(model="tokasaurus-builtin", input="Hi", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
        assert mine.responses.retrieve(made.id).id == made.id


def cached(client: openai.OpenAI, prompt: list[int], **more) -> int:
    answer = client.completions.create(model="tokasaurus-builtin", prompt=prompt, max_tokens=2, extra_body=more)
    return answer.usage.prompt_tokens_details.cached_tokens


def test_keys_do_not_share_cached_prefixes(guarded):
    prompt = [77] * 128
    with guarded.sdk("team") as mine, guarded.sdk("other") as theirs:
        assert cached(mine, prompt) == 0
        assert cached(mine, prompt) > 0
        assert cached(theirs, prompt) == 0
        assert cached(theirs, prompt) > 0
        assert cached(mine, prompt, cache_salt="x") == 0
        assert cached(mine, prompt, cache_salt="x") > 0
        assert cached(theirs, prompt, cache_salt="x") == 0


def test_requests_at_once_are_limited_for_each_key(guarded):
    body = {"prompt": [5] * 8, "max_tokens": 1500, "stream": True}
    with guarded.http("two-at-once") as client, guarded.http("team") as others:
        with client.stream("POST", "/v1/completions", json=body) as first:
            assert (first.status_code, first.headers["x-ratelimit-limit-requests"]) == (200, "2")
            with client.stream("POST", "/v1/completions", json=body) as second:
                assert second.headers["x-ratelimit-remaining-requests"] == "0"
                refused = client.post("/v1/completions", json=BODY)
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
                assert int(refused.headers["retry-after"]) >= 1
                assert others.post("/v1/completions", json=BODY).status_code == 200
                assert client.get("/v1/models").status_code == 200
        eventually(lambda: client.post("/v1/completions", json=BODY).status_code == 200)


def test_tokens_a_minute_are_reserved_and_what_was_not_made_comes_back(guarded):
    ask = {"prompt": [5] * 50, "max_tokens": 200, "stop_token_ids": list(range(16, 2048))}  # one token each
    with guarded.http("thrifty") as client:
        answer = client.post("/v1/completions", json=ask)
        assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 51)
        assert answer.headers["x-ratelimit-limit-tokens"] == "300"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 249
        answer = client.post("/v1/completions", json={"prompt": [5] * 50, "max_tokens": 190})
        assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 240)
        answer = client.post("/v1/completions", json=ask)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        never = client.post("/v1/completions", json=ask | {"max_tokens": 300})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
        assert client.post("/v1/completions", json={"prompt": [5] * 2000, "max_tokens": 100}).status_code == 400


@pytest.mark.parametrize(
    ("path", "prompt", "params"),
    [("/inference/v1/generate", "token_ids", {}), ("/generate", "input_ids", {"max_new_tokens": None})],
)
def test_a_rollout_without_a_limit_reserves_a_part_of_the_context(guarded, path, prompt, params):
    body = {prompt: [5, 6, 7], "sampling_params": params | {"stop": [*"aeinorst "]}}
    with guarded.http("trainer") as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_a_stream_that_its_client_leaves_costs_what_was_made_of_it(guarded):
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True}
    with guarded.http("open") as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            chunks = (line for line in answer.iter_lines() if line)
            assert list(islice(chunks, 1500))  # or all, on a machine that tells several tokens in one

        def left() -> str:
            return client.post("/tokenize", json={"prompt": "Hi"}).headers["x-ratelimit-remaining-tokens"]

        eventually(lambda: left() == "0")
