"""Web pages of other origins: which may call the API, and what they may read."""

import httpx
import pytest

from services.common.config import GatewayConfig
from services.common.flags import FlagError, load
from services.common.keys import hash_of
from tests.gateway.deployment import PATIENCE_S, Deployment

PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def open_to_a_page(tmp_path_factory):
    """A gateway that pages of one origin may call, with a key."""
    directory = tmp_path_factory.mktemp("cors")
    (directory / "keys.toml").write_text(f'[[keys]]\nname = "own"\nhash = "{hash_of("secret")}"\n')
    flags = {"cors_origins": f"{PAGE},http://localhost:3000", "api_keys_file": directory / "keys.toml"}
    running = Deployment(directory, gateway=flags).wait_ready()
    yield running
    running.stop()


def preflight(deployment, origin, path=COMPLETIONS, method="POST") -> httpx.Response:
    asked = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
    }
    return httpx.options(deployment.url + path, headers=asked, timeout=PATIENCE_S)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/v1/files/x", "/nowhere"])
def test_a_browser_may_ask_first_without_a_key(open_to_a_page, path):
    answer = preflight(open_to_a_page, PAGE, path, "DELETE")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "DELETE" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()


def test_pages_of_other_origins_may_not(open_to_a_page):
    answer = preflight(open_to_a_page, OTHER)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("key", "status"), [("secret", 200), ("wrong", 401)])
def test_a_page_reads_answers_and_errors(open_to_a_page, key, status):
    for origin, allowed in ((PAGE, PAGE), ("http://localhost:3000", "http://localhost:3000"), (OTHER, None)):
        headers = {"origin": origin, "authorization": f"Bearer {key}"}
        answer = httpx.post(open_to_a_page.url + COMPLETIONS, json=BODY, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == allowed
        if allowed:
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_a_page_reads_a_stream(open_to_a_page):
    headers = {"origin": PAGE, "authorization": "Bearer secret"}
    body = BODY | {"stream": True}
    answer = httpx.post(open_to_a_page.url + COMPLETIONS, json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/console", "/console/state", "/console/requests"])
def test_no_other_page_may_call_the_console(open_to_a_page, path):
    assert preflight(open_to_a_page, PAGE, path, "DELETE").status_code in (401, 403, 405)
    answer = httpx.get(open_to_a_page.url + path, headers={"origin": PAGE}, timeout=PATIENCE_S)
    assert "access-control-allow-origin" not in answer.headers


def test_no_page_may_where_no_origin_is_listed(deployment):
    assert preflight(deployment, PAGE).status_code == 405
    answer = httpx.post(deployment.url + COMPLETIONS, json=BODY, headers={"origin": PAGE}, timeout=PATIENCE_S)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("given", ["chat.example.com", "https://chat.example.com/", "https://a.b/c"])
def test_what_is_no_origin_is_refused_at_the_start(given):
    with pytest.raises(FlagError, match="SCHEME://HOST"):
        load(GatewayConfig, [f"cors_origins={given}"], {})
