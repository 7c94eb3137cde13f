"""What is served below ``/console``, and to whom."""

import re
from pathlib import Path

import httpx
import pytest

from services.common.config import GatewayConfig
from services.gateway.app.admin import make_admin_app
from services.gateway.app.app import make_app
from services.gateway.batch.service import BatchService
from services.gateway.console import assets
from services.gateway.console.observer import Observer
from services.gateway.engine.session import Timings
from services.gateway.openai.gateway import Gateway
from tests.gateway.access.conftest import KeysFile

STATIC = Path(assets.__file__).parent / "static"
FILES = sorted(path.name for path in STATIC.iterdir())
OPEN = ("/console", "/console/config", "/console/static/main.js", "/console/static/console.css")


class Ports:
    """A gateway without schedulers: clients of its public port and of its operators' port."""

    def __init__(self, **flags) -> None:
        self.gateway = Gateway.make(GatewayConfig(**flags), Timings(wait_for_ready=0.0))
        observer = Observer(self.gateway.fleet)
        public = make_app(self.gateway, BatchService(self.gateway), observer)
        self.public, self.admin = _client(public), _client(make_admin_app(self.gateway, observer))


def _client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@pytest.fixture
async def ports():
    made = []

    def make(**flags) -> Ports:
        made.append(Ports(**flags))
        return made[-1]

    yield make
    for each in made:
        await each.public.aclose()
        await each.admin.aclose()
        each.gateway.text.stop()


async def test_every_file_is_served_as_what_it_is(ports):
    client = ports().public
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for name in FILES:
        answer = await client.get(f"/console/static/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].partition(";")[0] == types[name.rpartition(".")[2]]
        assert answer.content == (STATIC / name).read_bytes()
    page = await client.get("/console")
    assert page.content == (STATIC / "index.html").read_bytes()
    assert (await client.head("/console")).status_code == 200
    assert (await client.get("/console/")).headers["location"] == "../console"


async def test_nothing_may_be_inline_or_from_elsewhere(ports):
    for path in OPEN[:1] + OPEN[2:]:
        headers = (await ports().public.get(path)).headers
        policy = dict(part.partition(" ")[::2] for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=|javascript:", page) == []
    for name in FILES:
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?://|[\"']//", text) == [], name


def test_every_file_is_used_and_every_name_leads_somewhere():
    named = set()
    for name in FILES:
        text = (STATIC / name).read_text()
        named |= set(re.findall(r'"console/static/([^"]+)"', text)) | set(re.findall(r'from "\./([^"]+)"', text))
    assert named == set(FILES) - {"index.html"}
    page = (STATIC / "index.html").read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    assert set(re.findall(r'\b(?:for|aria-controls|aria-labelledby)="([^"]+)"', page)) <= ids
    for name in FILES:
        assert set(re.findall(r'\b(?:byId|set)\("([^"]+)"', (STATIC / name).read_text())) <= ids, name


async def test_what_did_not_change_is_not_sent_again(ports):
    client = ports().public
    first = await client.get("/console/static/main.js")
    again = await client.get("/console/static/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await client.get("/console/static/main.js", headers={"if-none-match": '"other"'})
    assert other.content == first.content


@pytest.mark.parametrize("name", ["nothing.js", "..%2fassets.py", "%2e%2e%2fassets.py", "../assets.py", "", "a/b.js"])
async def test_there_are_no_other_files(ports, name):
    assert (await ports().public.get(f"/console/static/{name}")).status_code == 404


async def test_with_keys_the_page_is_open_and_its_figures_are_for_operators(ports, tmp_path):
    keys = KeysFile(tmp_path / "keys.toml")
    client = ports(api_keys_file=str(keys.path)).public
    for path in OPEN:
        assert (await client.get(path)).status_code == 200
    assert (await client.get("/console/config")).json() == {"keys": True, "playground": True, "live": True}
    for path in ("/console/state", "/console/static", "/console/other", "/console/state/", "/v1/models"):
        refused = await client.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), path
    team, boss = ({"authorization": f"Bearer {keys.keys[name]}"} for name in ("team", "boss"))
    refused = await client.get("/console/state", headers=team)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    for headers, status in (({}, 401), (team, 403), (boss, 503)):  # the last: let in, and there is no scheduler
        assert (await client.delete("/console/requests?id=x", headers=headers)).status_code == status
    state = await client.get("/console/state", headers=boss)
    assert state.status_code == 200
    assert state.headers["cache-control"] == "no-store"


async def test_where_operators_have_a_port_the_figures_are_there_only(ports):
    both = ports(admin_port=10299)
    assert (await both.public.get("/console/config")).json() == {"keys": False, "playground": True, "live": False}
    assert (await both.public.get("/console/state")).status_code == 404
    assert (await both.public.delete("/console/requests?id=x")).json()["error"]["code"] == "unknown_url"
    assert (await both.admin.delete("/console/requests?id=x")).json()["error"]["code"] == "unavailable"
    assert (await both.admin.get("/console/config")).json() == {"keys": False, "playground": False, "live": True}
    for path in (*OPEN, "/console/state"):
        assert (await both.admin.get(path)).status_code == 200


async def test_without_schedulers_the_state_says_why(ports):
    state = (await ports(scheduler_addresses=("a:1", "b:2")).public.get("/console/state")).json()
    assert not state["gateway"]["ready"]
    assert [(each["address"], each["ready"], each["reason"]) for each in state["replicas"]] == [
        ("a:1", False, "not connected yet"),
        ("b:2", False, "not connected yet"),
    ]
    assert {each["load"] or each["schedule"] or each["plan"] for each in state["replicas"]} == {None}
