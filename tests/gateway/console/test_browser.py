"""The console in a real browser: Debian's chromium or another Chrome on the path, driven through Playwright."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from bench.server import free_port
from tests.gateway.access.conftest import KeysFile
from tests.gateway.deployment import PATIENCE_S, Process, eventually
from tokasaurus.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
PATIENCE_MS = PATIENCE_S * 1000
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@dataclass
class Tab:
    """A page, and what went wrong on it."""

    page: playwright.Page
    problems: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def say(self, prompt: str, **parameters: str) -> None:
        for name, value in parameters.items():
            self.page.fill(f"#{name}", value)
        self.page.fill("#prompt", prompt)
        self.page.press("#prompt", "Enter")

    def begins(self) -> None:
        """There are tokens of an answer."""
        playwright.expect(self.page.locator(".token").nth(3)).to_be_visible()

    def expect(self, selector: str, text: str | re.Pattern | None = None) -> playwright.Locator:
        found = self.page.locator(selector)
        playwright.expect(found).to_be_visible()
        if text is not None:
            playwright.expect(found).to_have_text(text)
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=list(FLAGS), timeout=PATIENCE_MS)
        yield running
        running.close()


@pytest.fixture
def open_tab(browser):
    """Opens pages. At the end: no error in any, and no request to another host."""
    tabs: list[tuple[Tab, str]] = []

    def open_at(url: str, path: str = "/console", *, size=DESK, scheme="light") -> Tab:
        page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
        page.set_default_timeout(PATIENCE_MS)
        tab = Tab(page)
        page.on("console", lambda said: tab.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: tab.problems.append(str(error)))
        page.on("request", lambda request: tab.urls.append(request.url))
        page.goto(url + path)
        tabs.append((tab, urlsplit(url).netloc))
        return tab

    yield open_at
    for tab, _ in tabs:
        tab.page.context.close()
    for tab, host in tabs:
        assert {urlsplit(each).netloc for each in tab.urls} == {host}
        assert tab.problems == []


def running_sequences(deployment) -> int:
    state = httpx.get(deployment.url + "/console/state", timeout=PATIENCE_S).json()
    return sum(each["load"]["running_sequences"] for each in state["replicas"] if each["load"])


def test_a_chat_streams_in_the_colours_of_its_probabilities(watched, open_tab):
    tab = open_tab(watched.url)
    tab.say("Hello", max_tokens="60", seed="7", top_logprobs="4")
    tab.expect(".said", "Hello")
    tab.begins()
    assert tab.page.locator("#stop-button").is_enabled()  # while it runs there are tokens already
    tab.expect(".finish", "length")
    usage = tab.expect(".usage").text_content()
    assert "60 generated" in usage
    assert "queue" in usage
    asked = {"model": "tokasaurus-builtin", "seed": 7, "max_tokens": 60, "logprobs": True, "top_logprobs": 4}
    choice = watched.chat(messages=[{"role": "user", "content": "Hello"}], **asked).json()["choices"][0]
    assert tab.page.locator(".answer .text").text_content() == choice["message"]["content"]
    tokens = tab.page.locator(".token")
    colours = tokens.evaluate_all("all => new Set(all.map(each => getComputedStyle(each).backgroundColor)).size")
    assert colours > 1 or len({each["logprob"] for each in choice["logprobs"]["content"]}) == 1
    tokens.nth(2).hover()
    rows = tab.expect("#alternatives").locator("tr")
    assert rows.count() >= 4
    assert tab.page.locator("#alternatives .chosen").count() == 1
    tab.page.mouse.move(5, 5)
    playwright.expect(tab.page.locator("#alternatives")).to_be_hidden()


def test_tokens_are_reached_with_the_keyboard(watched, open_tab):
    tab = open_tab(watched.url)
    tab.say("Hi", max_tokens="5")
    tab.expect(".finish")
    while not tab.page.evaluate("document.activeElement.matches('.answer .text')"):
        tab.page.keyboard.press("Shift+Tab")
    tab.expect("#alternatives")
    tab.page.keyboard.press("ArrowRight")
    assert (
        tab.page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.querySelector('.current'))") == 1
    )


def test_parameters_reach_the_request(watched, open_tab):
    tab = open_tab(watched.url, scheme="dark")
    tab.page.check("input[value=completion]")
    schema = '{"enum": ["yes", "no"]}'
    sent: list[dict] = []
    tab.page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    tab.say("A:", n="2", temperature="0.5", top_p="0.9", max_tokens="40", stop="x1\ny2", schema=schema)
    playwright.expect(tab.page.locator(".finish-stop")).to_have_count(2)
    assert {**sent[0], "response_format": None} == {
        "model": "tokasaurus-builtin", "prompt": "A:", "n": 2, "temperature": 0.5, "top_p": 0.9, "max_tokens": 40,
        "stop": ["x1", "y2"], "logprobs": 5, "stream": True, "stream_options": {"include_usage": True},
        "response_format": None,
    }  # fmt: skip
    for text in tab.page.locator(".answer .text").all_text_contents():
        assert text in ('"yes"', '"no"')
    tab.say("B:", schema="{", n="1")
    playwright.expect(tab.page.locator("#parameter-problem")).to_contain_text("JSON schema of the answer")
    tab.say("B:", schema="", top_p="2")
    playwright.expect(tab.page.locator("#parameter-problem")).to_contain_text("Top p")
    assert len(sent) == 1


def test_stop_ends_the_answer_on_the_server_too(watched, open_tab):
    tab = open_tab(watched.url)
    tab.say("Go on", max_tokens="1900", n="3")
    tab.begins()
    eventually(lambda: running_sequences(watched) >= 3)
    tab.page.click("#stop-button")
    playwright.expect(tab.page.locator(".finish-stopped")).to_have_count(3)
    eventually(lambda: running_sequences(watched) == 0)
    tab.say("Again", max_tokens="3", n="1")
    tab.expect(".answers:last-child .finish", "length")


def test_the_forecast_moves_and_a_request_of_this_page_is_cancelled(watched, open_tab, nobody):
    tab = open_tab(watched.url)
    tab.say("A long one", max_tokens="1900")
    tab.begins()
    tab.page.click("#tab-live")
    tab.expect("#status", "1 of 2 ready")
    row = tab.expect("#requests tr")
    assert row.locator("td").nth(1).text_content() == "running"
    curve = tab.page.locator("#pages path.line.future")
    playwright.expect(curve).to_have_count(1)
    seen = curve.get_attribute("d")
    playwright.expect(curve).not_to_have_attribute("d", seen)
    playwright.expect(row.locator("td").nth(6)).to_have_text(re.compile(r"in \d"))
    playwright.expect(tab.page.locator("#tile-running")).to_have_text("1")
    playwright.expect(tab.page.locator("#tile-out")).not_to_have_text(re.compile(r"^[–0]$"))
    states = {
        each.locator("th").text_content(): each.locator("td").nth(1).text_content()
        for each in tab.page.locator("#replicas tr").all()
    }
    assert states[watched.scheduler_address] == "ready"
    assert states[nobody] not in ("", "ready")
    row.get_by_role("button", name="Cancel").click()
    playwright.expect(tab.page.locator("#requests tr")).to_have_count(0)
    eventually(lambda: running_sequences(watched) == 0)
    tab.page.click("#tab-playground")
    tab.expect(".finish", "stopped")


def test_another_clients_request_is_cancelled_when_its_operator_is_sure(watched, open_tab):
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 2}
    with httpx.stream("POST", watched.url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        tab = open_tab(watched.url, "/console#live", size=PHONE)
        asked: list[str] = []
        tab.page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        row = tab.expect("#requests tr")
        playwright.expect(row.locator("th")).to_have_text(answer.headers["x-request-id"])
        playwright.expect(row.locator("td").nth(1)).to_have_text("2 running")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        button = row.get_by_role("button", name="Cancel")
        button.click()
        assert answer.headers["x-request-id"] in asked[0]
        assert running_sequences(watched) == 2
        tab.page.once("dialog", lambda dialog: dialog.accept())
        button.click()
        playwright.expect(tab.page.locator("#requests tr")).to_have_count(0)
        *_, last = (line for line in answer.iter_lines() if line)
    assert json.loads(last.removeprefix("data:"))["error"]["code"] == "cancelled_by_operator"
    eventually(lambda: running_sequences(watched) == 0)
    assert tab.page.locator("#cancel-problem").text_content() == ""


def test_what_models_and_other_clients_say_stays_text(watched, open_tab):
    markup = "<img src=x onerror=alert(1)>"
    tab = open_tab(watched.url)
    tab.say(markup, max_tokens="100", schema=json.dumps({"const": markup}))
    tab.expect(".said", markup)
    tab.expect(".finish", "stop")
    assert tab.page.locator(".answer .text").text_content() == json.dumps(markup)
    with grpc.insecure_channel(watched.scheduler_address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(
            generate_pb2.GenerateRequest(
                text="x",
                request_id=markup,
                fairness_key=markup,
                stopping=generate_pb2.Stopping(max_tokens=1500, ignore_eos=True),
            )
        )
        next(call)
        tab.page.click("#tab-live")
        playwright.expect(tab.page.locator("#requests th").filter(has_text=markup)).to_be_visible()
        call.cancel()
    assert tab.page.locator("main img").count() == 0


def test_a_key_is_asked_for_and_stays_in_the_tab(watched, open_tab, tmp_path):
    keys = KeysFile(tmp_path / "keys.toml")
    url = f"http://127.0.0.1:{(port := free_port())}"
    flags = {"scheduler_addresses": watched.scheduler_address, "store_dir": tmp_path / "store", "port": port}
    gateway = Process(tmp_path / "gateway.log", "services.gateway", api_keys_file=keys.path, **flags)
    try:
        eventually(lambda: answers(f"{url}/ready"))
        tab = open_tab(url)
        tab.page.fill("#key", "tk-wrong")
        tab.page.press("#key", "Enter")
        tab.expect("#key-problem", re.compile("not known"))
        tab.page.fill("#key", keys.keys["team"])
        tab.page.press("#key", "Enter")
        playwright.expect(tab.page.locator("#model option")).to_have_count(1)
        tab.say("Hello", max_tokens="3")
        tab.expect(".finish", "length")
        tab.page.click("#tab-live")
        playwright.expect(tab.page.locator("#live-problem")).to_contain_text("for operators")
        tab.page.reload()
        playwright.expect(tab.page.locator("#live-problem")).to_contain_text("scope 'admin'")  # it was not asked again
        assert not any(keys.keys["team"] in each for each in tab.urls)
        assert tab.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        tab.page.click("#forget-key")
        tab.page.fill("#key", keys.keys["boss"])
        tab.page.press("#key", "Enter")
        playwright.expect(tab.page.locator("#status")).to_have_text("1 of 1 ready")
        assert all("401" in each or "403" in each for each in tab.problems)  # the browser's own words
        tab.problems.clear()
        tab.page.close()
    finally:
        gateway.stop()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False
