"""The chaos program, small, and that it notices what it is there to notice."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from bench.chaos.__main__ import is_right
from bench.chaos.answer import Answer, Choice, Defect, check, check_beginning
from bench.chaos.clients import Clients
from bench.chaos.cluster import FAKE_SIZES
from bench.chaos.links import is_right as links_are_right
from bench.chaos.network import Link, network
from bench.chaos.questions import Question, make_questions
from bench.chaos.recovery import Ask, Recoveries
from bench.chaos.schedule import KINDS, all_links, plan_faults
from bench.chaos.tally import Tally
from bench.chaos.updates import Wrong, check_choice
from bench.chaos.weather import Weather
from tests.e2e.test_bench_batches import run
from tests.fakes.model import FakeShape, continuation
from tests.gateway.deployment import eventually

TEXT = "Nine sheep went over the hill, and all of them came back."
RIGHT = Answer({0: Choice(text=TEXT, finish="length")}, prompt_tokens=3, completion_tokens=14)
QUESTION = Question(0, "/v1/completions", {"prompt": "x"}, RIGHT)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_killed_under_load_costs_no_request():
    figures = run("chaos", seconds=4, streams=4, worker="fake", netns="F", faults=1, kinds="kill-worker",
                  gateways=1, replicas=1, questions=12)  # fmt: skip
    assert figures["requests"] > 4
    assert figures["tokens"] > 0
    assert figures["faults_by_kind"] == {"kill-worker": 1}
    recovery = figures["recovery"]["kill-worker"]
    assert (recovery["count"], recovery.get("unmoved", 0)) == (1, 0)
    assert recovery["worst_s"] is not None
    assert (figures["lost"], figures["duplicated"], figures["wrong"], figures["hangs"]) == (0, 0, 0, 0)
    assert figures["crashes"] == {}
    assert figures["partitions"].startswith("skipped")


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        *(({name: 1}, False) for name in ("lost", "duplicated", "wrong", "hangs", "left_running")),
        ({"crashes": {"worker-0 -11": 1}}, False),
        ({"late": ["gateway-0 60 s after SIGTERM"]}, False),
        ({"violations": ["worker-0: violations: ..."]}, False),
        ({"faults": 9}, False),
    ],
)
def test_a_run_is_right_only_if_every_fault_struck_and_nothing_else_went_wrong(change, right):
    counts = dict.fromkeys(("lost", "duplicated", "wrong", "hangs", "left_running"), 0)
    figures = counts | {"crashes": {}, "late": [], "violations": [], "faults": 10, "faults_asked": 10}
    assert is_right(figures | change) is right


# -- what the clients notice


def events(text: str, *more: dict) -> bytes:
    """A stream that says ``text``, in three pieces."""
    third = len(text) // 3
    pieces = (text[:third], text[third : 2 * third], text[2 * third :])
    chunks = [{"id": "a", "choices": [{"index": 0, "text": piece, "finish_reason": None}]} for piece in pieces]
    chunks[-1]["choices"][0]["finish_reason"] = "length"
    usage = {"id": "a", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 14}}
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in (*chunks, *more, usage))


DONE = b"data: [DONE]\n\n"
GOES = b'{"error": {"message": "the gateway is shutting down; send the request again"}}'


@contextlib.asynccontextmanager
async def gateway(body: bytes, *, status: int = 200, ends: str = "well") -> AsyncIterator[str]:
    """Answers every request with ``body``, and then ``ends``: well, broken or never."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            kind = b"text/event-stream" if body.startswith(b"data") else b"application/json"
            writer.write(b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % (status, kind))
            writer.write(b"%x\r\n%s\r\n" % (len(body), body) + (b"0\r\n\r\n" if ends == "well" else b""))
            await writer.drain()
            if ends == "never":
                await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def ask(tally: Tally, urls: dict[str, str], weather: Weather | None = None, seed: int = 0) -> dict[str, int]:
    """What one client counts with one question, which it asks streamed."""
    clients = Clients(1, urls, [QUESTION], weather=weather or Weather(), recoveries=Recoveries(), tally=tally,
                      hang_s=1.0, seed=seed, streamed=1.0)  # fmt: skip
    await clients.run(lambda: tally.figures()["requests"] > 0)
    return {name: count for name, count in tally.figures().items() if count and name not in ("requests", "tokens")}


@pytest.mark.parametrize(
    ("body", "how", "noticed"),
    [
        (events(TEXT) + DONE, {}, {}),
        (events(TEXT.replace("Nine", "Five")) + DONE, {}, {"wrong": 1}),
        (events(TEXT.replace("all of ", "all of all of ")) + DONE, {}, {"duplicated": 1}),
        (events(TEXT.replace("all of ", "")) + DONE, {}, {"lost": 1}),
        (events(TEXT, {"id": "b", "choices": []}) + DONE, {}, {"wrong": 1}),
        (
            events(TEXT, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}) + DONE,
            {},
            {"duplicated": 1},
        ),
        (events(TEXT) + DONE + DONE, {}, {"duplicated": 1}),
        (events(TEXT), {}, {"lost": 1}),
        (events(TEXT), {"ends": "broken"}, {"lost": 1}),
        (events(TEXT), {"ends": "never"}, {"hang": 1}),
        (events(TEXT, {"error": {"message": "the scheduler was lost"}}) + DONE, {}, {"lost": 1}),
        (b'{"error": {"message": "no scheduler"}}', {"status": 503}, {"lost": 1}),
        (GOES, {"status": 503}, {"lost": 1}),  # nobody had asked it to
        (b"data: {no JSON\n\n" + DONE, {}, {"wrong": 1}),
    ],
)
async def test_a_client_notices(tmp_path, body, how, noticed):
    async with gateway(body, **how) as url:
        found = await ask(Tally(tmp_path), {"gateway-0": url})
    assert found == {"hangs" if kind == "hang" else kind: count for kind, count in noticed.items()}
    stories = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert len(stories) == len(noticed)
    for story in stories:
        assert story["right"]["choices"]["0"]["text"] == TEXT
        assert story["request"]["prompt"] == "x"


@pytest.mark.parametrize(
    ("body", "how"),
    [
        (events(TEXT), {"ends": "broken"}),
        (events(TEXT).split(b"\n\n")[0] + b"\n\ndata: " + GOES + b"\n\n", {}),
        (GOES, {"status": 503}),
    ],
)
async def test_what_was_lost_with_its_gateway_is_asked_for_again(tmp_path, body, how):
    weather = Weather()
    weather.strikes("term-gateway", ("gateway-0",))
    async with gateway(body, **how) as broken, gateway(events(TEXT) + DONE) as whole:
        tally = Tally(tmp_path)
        urls = {"gateway-0": broken, "gateway-1": whole}
        for seed in range(8):  # with some of them the client goes to the broken one first
            await ask(tally, urls, weather, seed)
            tally.requests = 0
    assert tally.retries > 0
    assert tally.perfect


async def test_text_that_was_wrong_before_the_stream_broke_is_not_forgiven(tmp_path):
    weather = Weather()
    weather.strikes("kill-gateway", ("gateway-0",))
    async with gateway(events(TEXT.upper()), ends="broken") as url:
        assert await ask(Tally(tmp_path), {"gateway-0": url}, weather) == {"wrong": 1}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda answer: answer.choices.pop(0), "lost"),
        (lambda answer: setattr(answer.choices[0], "finish", None), "lost"),
        (lambda answer: setattr(answer.choices[0], "finish", "stop"), "wrong"),
        (lambda answer: setattr(answer, "completion_tokens", 15), "duplicated"),
        (lambda answer: setattr(answer, "completion_tokens", 13), "lost"),
        (lambda answer: setattr(answer.choices[0], "logprobs", [-1.0, -0.9]), "wrong"),
        (lambda answer: setattr(answer.choices[0], "tokens", ["a", "b", "b"]), "duplicated"),
    ],
)
def test_an_answer_is_held_against_the_right_one(change: Callable[[Answer], None], kind: str):
    def answer() -> Answer:
        return Answer({0: Choice(TEXT, "length", ["a", "b"], [-1.0, -2.0], [1, 1])}, 3, 14)

    check(answer(), answer())
    changed = answer()
    change(changed)
    with pytest.raises(Defect) as caught:
        check(answer(), changed)
    assert caught.value.kind == kind


def test_what_came_before_a_stream_broke_must_be_its_beginning():
    check_beginning(RIGHT, Answer({0: Choice(TEXT[:9])}))
    with pytest.raises(Defect):
        check_beginning(RIGHT, Answer({0: Choice("Ten")}))
    with pytest.raises(Defect):
        check_beginning(RIGHT, Answer({1: Choice("N")}))


def test_a_fault_is_over_when_every_open_stream_has_moved_on():
    recoveries, asks = Recoveries(), [Ask(), Ask()]
    recoveries.open |= set(asks)
    recoveries.begin("kill-worker", None)
    asks[0].progress()
    assert recoveries.figures()["kill-worker"]["unmoved"] == 1
    asks[1].progress()
    assert "unmoved" not in recoveries.figures()["kill-worker"]


def test_a_seed_decides_faults_and_questions():
    services = {role: [f"{role}-0", f"{role}-1"] for role in ("gateway", "scheduler", "worker")}
    links = all_links(*services.values())

    def plan(seed: int):
        return plan_faults(60, 100.0, KINDS, services, links, 12.0, seed)

    assert plan(1) == plan(1) != plan(2)
    faults = plan(1)
    assert {fault.kind for fault in faults[: len(KINDS)]} == set(KINDS)  # they take turns
    assert all(0 < fault.at < 100 and 1 <= fault.seconds <= 12 for fault in faults)
    assert {fault.targets for fault in faults if fault.kind == "kill-schedulers"} == {("scheduler-0", "scheduler-1")}
    assert make_questions(20, 1)[7].body == make_questions(20, 1)[7].body


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces are root's")
def test_a_cut_link_lets_nothing_through_and_a_healed_one_all():
    link = Link("client", "gateway-0")
    with network(["gateway-0"], [link], "auto") as wires:
        if wires.partitions != "on":
            pytest.skip(wires.partitions)
        host = wires.reach("gateway-0", "client")
        command = [*wires.within("gateway-0"), sys.executable, "-m", "http.server", "8000", "--bind", host]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                eventually(lambda: connects(host, 60))
                wires.cut(link)
                assert not connects(host, 1)
                wires.heal(link)
                assert connects(host, 60)
            finally:
                server.kill()


def connects(host: str, patience_s: float) -> bool:
    try:
        socket.create_connection((host, 8000), patience_s).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("trial", "right"),
    [
        ({}, True),
        ({"ready_s": 15.1}, False),
        ({"ready_s": None}, False),
        ({"hang": 1}, False),
        ({"wrong": 1}, False),
        ({"wrong": 1, "fault": "garble"}, True),  # of links in plain text
        ({"ended": "scheduler.log"}, False),
    ],
)
def test_links_are_right_only_if_they_are_ready_soon_and_every_request_ended(trial, right):
    usual = {"link": "client-gateway", "fault": "stall", "seconds": 1, "ready_s": 2.0, "right": 3, "error": 1}
    assert links_are_right({"trials": [usual, usual | trial]}) is right


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_are_replaced_although_services_are_killed():
    figures = run("chaos.updates", updates=4, streams=4, kills=1, gateways=1, netns="F")
    assert figures["updates"] == 4
    assert sum(count for name, count in figures.items() if name.startswith("killed")) == 4
    assert figures["spans"] > 4
    assert (figures["problems"], figures["crashes"], figures["violations"]) == ([], {}, [])


SAMPLED = {"prompt": [50, 51, 52], "temperature": 1.0, "seed": 5, "max_tokens": 30}


def sampled(versions: dict[int, int], with_span: int, **more) -> dict:
    """Return an answer to ``SAMPLED`` with tokens of these versions. The last ``with_span`` versions have a span."""
    tokens: list[int] = []
    for version, count in versions.items():
        tokens += continuation(FakeShape(**FAKE_SIZES), [*SAMPLED["prompt"], *tokens], count, seed=5, weights=version)
    spans = [{"version": str(version or ""), "tokens": count} for version, count in versions.items()]
    choice = {"index": 0, "token_ids": tokens, "finish_reason": "length", "weights": spans[len(spans) - with_span :]}
    return choice | more


@pytest.mark.parametrize("with_span", [2, 1, 0])
def test_tokens_of_each_version_are_right_with_and_without_a_span(with_span):
    spans = check_choice(SAMPLED, sampled({0: 10, 2: 20}, with_span), 3)
    assert spans == [(0, 10), (2, 20)][2 - with_span :]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (sampled({0: 10, 2: 20}, 2, weights=[{"version": "", "tokens": 11}, {"version": "2", "tokens": 19}]), "not of"),
        (sampled({2: 10, 0: 20}, 2), "version 0 after 2"),
        (sampled({2: 10, 0: 20}, 1), "version 0 after 2"),
        (sampled({0: 10, 4: 20}, 0), "of no version"),
        (sampled({0: 10, 2: 19}, 2), "end with length"),
        (sampled({0: 10, 2: 20}, 2, finish_reason="stop"), "end with stop"),
    ],
)
def test_a_token_that_is_not_of_its_version_is_noticed(choice, reason):
    with pytest.raises(Wrong, match=reason):
        check_choice(SAMPLED, choice, 3)
