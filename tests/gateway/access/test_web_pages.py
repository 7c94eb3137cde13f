"""Web pages of other sites and of rebound names, at ports that require no key: what a browser sends for them."""

import socket

import httpx
import pytest

from bench.server import free_port
from services.common.config import GatewayConfig
from services.common.flags import FlagError, load
from services.common.keys import hash_of
from tests.gateway.access.test_keys_over_http import ROUTES
from tests.gateway.deployment import PATIENCE_S, Deployment

EVIL, EVIL_HOST = "http://evil.example", "evil.example"
PAGE = "https://chat.example.com"
BODY = {"prompt": "x", "max_tokens": 2}
# What a browser sends of itself from a page of another site to a loopback address.
CROSS_SITE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "empty"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.fixture(scope="module")
def operated(tmp_path_factory):
    """A gateway with an admin port, further names and one other origin."""
    directory = tmp_path_factory.mktemp("operated")
    flags = {
        "admin_port": free_port(),
        "cors_origins": PAGE,
        "allowed_hosts": "api.example.com,*.apps.example.com",
    }
    running = Deployment(directory, gateway=flags).wait_ready()
    running.admin_url = f"http://127.0.0.1:{flags['admin_port']}"
    yield running
    running.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A gateway that requires keys, with an admin port, which requires none."""
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "keys.toml").write_text(f'[[keys]]\nname = "own"\nhash = "{hash_of("secret")}"\n')
    flags = {"api_keys_file": directory / "keys.toml", "admin_port": free_port()}
    running = Deployment(directory, gateway=flags).wait_ready()
    running.admin_url = f"http://127.0.0.1:{flags['admin_port']}"
    yield running
    running.stop()


def ask(url: str, method: str = "GET", **given) -> httpx.Response:
    return httpx.request(method, url, timeout=PATIENCE_S, **given)


def code(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_rebound_name_reaches_no_route(deployment, method, path):
    port = deployment.url.rpartition(":")[2]
    answer = ask(deployment.url + path, method, headers={"host": f"{EVIL_HOST}:{port}"})
    assert (answer.status_code, code(answer)) == (403, "host_not_allowed")
    assert "allowed_hosts=evil.example" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/ready", "/metrics", "/console", "/console/state", "/console/static/main.js", "/docs"]
)
def test_a_rebound_name_reads_nothing_of_operators(deployment, operated, guarded, path):
    for url in (deployment.url, operated.admin_url, guarded.admin_url):
        answer = ask(url + path, headers={"host": EVIL_HOST})
        assert (answer.status_code, code(answer)) == (403, "host_not_allowed")


def test_a_rebound_name_cancels_nothing(deployment, operated):
    for url in (deployment.url, operated.admin_url):
        own_page = {"host": EVIL_HOST, "origin": EVIL}
        answer = ask(url + "/console/requests?id=x", "DELETE", headers=own_page)
        assert (answer.status_code, code(answer)) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "EVIL.example:10210", "evil.example.", "127.0.0.1.evil.example", "localhost.evil.example",
        "api.example.com.evil.example", "notapi.example.com", "apps.example.com", "x@127.0.0.1",
        "127.0.0.1@evil.example", "evil.example:10210:1", "[evil.example]", "a b.example", "xn--e1afmkfd.example",
        "evil.1x", "1.evil",
    ],
)  # fmt: skip
def test_names_that_are_not_listed_are_refused(operated, host):
    answer = ask(operated.url + "/v1/models", headers={"host": host})
    assert (answer.status_code, code(answer)) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:1", "[::1]:10210", "[fe80::1]", "10.1.2.3:10210", "203.0.113.9", "localhost",
        "LOCALHOST:80", "localhost.", "app.localhost:1", "gateway", "tokasaurus-gateway:80", "node-1.local",
        "host.docker.internal",
        "tokasaurus-gateway.default.svc.cluster.local", "127.1", "0x7f.0.0.1", "api.example.com:8443",
        "API.example.com.", "a.b.apps.example.com", "",
    ],
)  # fmt: skip
def test_addresses_names_that_no_public_dns_has_and_listed_ones_are_taken(operated, host):
    answer = ask(operated.url + "/v1/models", headers={"host": host})
    assert answer.status_code == 200


def test_a_client_of_http_1_0_needs_no_host(deployment):
    host, _, port = deployment.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert client.recv(1024).split(b" ")[1] == b"200"


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_supervisor_hears_under_any_name_that_the_process_answers(deployment, operated, path):
    for url in (deployment.url, operated.admin_url):
        assert ask(url + path, headers={"host": EVIL_HOST}).status_code == 200


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[0] != "GET"])
@pytest.mark.parametrize("headers", [{"origin": EVIL}, {"origin": "null"}, CROSS_SITE, {"origin": EVIL} | CROSS_SITE])
def test_a_page_of_another_site_changes_nothing(deployment, method, path, headers):
    answer = ask(deployment.url + path, method, headers=headers)
    assert (answer.status_code, code(answer)) == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    "form",
    [
        {"content": b'{"prompt": "x"}', "headers": {"content-type": "text/plain"}},
        {"content": b"prompt=x", "headers": {"content-type": "application/x-www-form-urlencoded"}},
        {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}},
        {"content": b'{"prompt": "x"}'},
    ],
    ids=["text", "form", "multipart", "no type"],
)
@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[0] == "POST"])
def test_bodies_that_a_page_may_send_unasked_are_no_json(deployment, method, path, form):
    """A browser too old to name the page's origin is stopped by the type of the body."""
    answer = ask(deployment.url + path, method, **form)
    takes_a_form = path == "/v1/files" and "files" in form
    takes_no_body = path.endswith("/cancel") or path in ("/v1/embeddings", "/v1/completions/")
    assert answer.status_code in ({200} if takes_a_form else {400, 404, 405} if takes_no_body else {400, 415})
    assert takes_a_form or path == "/v1/files" or takes_no_body or answer.status_code == 415


def test_a_form_of_another_site_uploads_nothing(deployment):
    form = {"files": {"file": ("evil.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    answer = ask(deployment.url + "/v1/files", "POST", headers={"origin": EVIL} | CROSS_SITE, **form)
    assert answer.status_code == 403
    assert "evil.jsonl" not in ask(deployment.url + "/v1/files").text


@pytest.mark.parametrize("path", ["/console/state", "/console/config"])
def test_the_console_shows_other_sites_nothing(deployment, operated, path):
    for url in (deployment.url, operated.admin_url):
        for headers in ({"origin": EVIL}, {"origin": PAGE}, CROSS_SITE, CROSS_SITE | {"sec-fetch-site": "same-site"}):
            answer = ask(url + path, headers=headers)
            assert (answer.status_code, code(answer)) == (403, "origin_not_allowed")


def test_the_admin_port_changes_nothing_for_pages_of_other_sites(operated, guarded):
    for running in (operated, guarded):
        for headers in ({"origin": EVIL}, {"origin": PAGE}, CROSS_SITE):
            answer = ask(running.admin_url + "/console/requests?id=x", "DELETE", headers=headers)
            assert (answer.status_code, code(answer)) == (403, "origin_not_allowed")


def test_the_console_s_own_page_is_served_and_works(deployment):
    authority = deployment.url.removeprefix("http://")
    port = authority.rpartition(":")[2]
    assert ask(deployment.url + "/console", headers=LINK).status_code == 200
    own = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    assert ask(deployment.url + "/console/state", headers=own).status_code == 200
    for headers in (
        {"origin": deployment.url} | own,
        {"origin": deployment.url},
        {"origin": f"http://localhost:{port}", "host": f"LOCALHOST:{port}"},
        {"origin": "https://gateway", "host": "gateway:443"},  # behind a proxy
        {"origin": "https://chat.example.com", "sec-fetch-site": "same-origin"},  # behind one with a name of its own
    ):
        missing = ask(deployment.url + "/console/requests?id=x", "DELETE", headers=headers)
        assert (missing.status_code, code(missing)) == (404, "request_not_found")
        assert ask(deployment.url + "/v1/completions", "POST", headers=headers, json=BODY).status_code == 200


def test_a_listed_origin_uses_the_api_and_not_the_console(operated):
    for headers in ({"origin": PAGE}, {"origin": PAGE} | CROSS_SITE):
        answer = ask(operated.url + "/v1/completions", "POST", headers=headers, json=BODY)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
    other = ask(operated.url + "/v1/completions", "POST", headers={"origin": EVIL}, json=BODY)
    assert other.status_code == 403
    assert "cors_origins=" in other.json()["error"]["message"]


def test_a_key_is_proof_enough(guarded):
    headers = {"authorization": "Bearer secret", "host": EVIL_HOST, "origin": EVIL}
    assert ask(guarded.url + "/v1/completions", "POST", headers=headers, json=BODY).status_code == 200
    assert ask(guarded.url + "/ready", headers={"host": EVIL_HOST}).status_code == 200


@pytest.mark.parametrize(
    "given", ["http://a.example", "a.example:80", "a.*.example", "a b", "a.example/", "*.", "ex\u00e4mple.com"]
)
def test_what_is_no_host_name_is_refused_at_the_start(given):
    with pytest.raises(FlagError, match="allowed_hosts"):
        load(GatewayConfig, [f"allowed_hosts=a.example,{given}"], {})
