"""The parts of ``toka-bench``: what counts as an answer, when requests are sent, and what figures are made of them."""

import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from bench.send import send_all
from services.cli.bench.app import main
from services.cli.bench.clients import ClientError, Clients
from services.cli.bench.exchange import Endpoint, Reply
from services.cli.bench.figures import Figures, histogram, output_rate
from services.cli.bench.load import OfferedLoad, poisson
from services.cli.bench.plot import plot
from services.cli.bench.prompts import Asking, PromptLengths, Synthetic
from services.cli.bench.sending import Share
from services.cli.sparkline import sparkline
from tests.cli.running import run
from tests.common.rpc.authority import Authority

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
_TEXT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
_ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
ANSWERS = {
    "/whole": _HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 400\r\n\r\n") + (_ROLE + _TEXT + _USAGE).ljust(400),
    "/torn": _HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 400\r\n\r\n") + _TEXT,
    "/uncounted": _HEAD + _TEXT,
    "/broken": _HEAD + _TEXT + b'data: {"error":{"message":"out of luck"}}\n\n',
    "/nonsense": b"nonsense\r\n\r\n",
}


class Strange(BaseHTTPRequestHandler):
    """Answers of servers that are not ours, by path."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.wfile.write(ANSWERS[self.path])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def strange() -> Iterator[str]:
    with serving(Strange) as port:
        yield f"http://127.0.0.1:{port}"


class Guarded(Strange):
    """Lists a model and answers whoever has the key."""

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "model"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": asked["max_tokens"]}
        self._answer(json.dumps({"choices": [{"text": "a"}], "usage": usage}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200 if self.headers["authorization"] == "Bearer secret" else 401)
        self.end_headers()
        self.wfile.write(body)


def test_a_server_with_tls_and_a_key(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    monkeypatch.delenv("TOKA_API_KEY", raising=False)
    with serving(Guarded, tls) as port:
        asked = ["serve", "--url", f"https://localhost:{port}/v1/", "--requests", "2", "--warmup", "0"]
        known = ["--ca", str(authority.cert), "--json", str(tmp_path / "out.json")]
        outcome = run(main, *asked, *known, environment={"OPENAI_API_KEY": "secret"})
        assert outcome.status == 0, outcome.output
        told = json.loads((tmp_path / "out.json").read_text())
        assert (told["model"], told["input_tokens"], told["output_tokens"]) == ("model", 2 * 256, 2 * 128)
        assert "secret" not in json.dumps(told) + outcome.output
        outcome = run(main, *asked, *known, environment={"OPENAI_API_KEY": "wrong"})
        assert outcome.status == 1
        assert "set OPENAI_API_KEY" in outcome.stderr
        outcome = run(main, *asked, "--api-key", "secret")
        assert outcome.status == 1
        assert "certificate" in outcome.stderr.lower()


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("/whole", "", ""),
        ("/torn", "connection lost", "before the answer's end"),
        ("/uncounted", "no usage", "status 200"),
        ("/broken", "error in the stream", "out of luck"),
        ("/nonsense", "connection lost", "before the answer's end"),
    ],
)
def test_only_a_whole_answer_with_usage_is_one(strange, path, kind, said):
    [reply] = send_all(strange + path, [{"model": "m"}])
    assert reply.kind == kind
    assert said in reply.error
    assert (reply.prompt_tokens, reply.completion_tokens) == ((0, 0) if kind else (3, 2))


def test_a_client_process_that_fails_is_told(strange):
    unknown = Share(range(1), {7: {}}.__getitem__)
    with pytest.raises(ClientError, match="KeyError"), Clients(Endpoint(strange), [unknown]):
        pass


def reply(sent: float, first: float, last: float, ended: float, tokens: int = 0, **more) -> Reply:
    return Reply(sent, first, last, ended, 10, tokens, **more)


def test_figures_are_those_of_the_replies():
    replies = [
        reply(0, 0.1, 0.5, 0.5, 5, gaps=[0.1, 0.3]),
        reply(1, 1.3, 1.5, 2.0, 2, gaps=[0.2]),
        reply(1, 1, 1, 1.1, kind="HTTP 503", error="busy"),
        reply(1, 1, 1, 1.1, kind="timeout", error="late"),
        reply(1, 1, 1, 1.1, kind="HTTP 503", error="busy again"),
    ]
    figures = Figures.of(replies, streamed=True)
    assert (figures.seconds, figures.succeeded, figures.failed) == (2.0, 2, 3)
    assert (figures.input_tokens, figures.output_tokens) == (20, 7)
    assert figures.as_json()["output_tokens_per_second"] == 3.5
    assert [(kind, each.count, each.example) for kind, each in figures.errors.items()] == [
        ("HTTP 503", 2, "busy"),
        ("timeout", 1, "late"),
    ]
    assert (figures.first_token_ms.p50, figures.first_token_ms.most) == pytest.approx((200, 300))
    assert figures.inter_token_ms.p50 == pytest.approx(200)
    assert figures.per_token_ms.mean == pytest.approx((100 + 200) / 2)
    assert figures.end_to_end_ms.most == pytest.approx(1000)
    assert Figures.of(replies, streamed=False).first_token_ms is None
    assert Figures.of([], streamed=True).rate(0) == 0


@pytest.mark.parametrize("streamed", [True, False])
def test_the_rate_over_time_holds_every_token(streamed):
    replies = [reply(at, at + 0.2, at + 0.9, at + 1, 30) for at in (0.0, 0.5, 3.0)]
    seconds, rates = output_rate(replies, 8, streamed=streamed)
    assert sum(rates) * 4 / 8 == pytest.approx(90)
    assert rates[4] == 0  # between the second and the third
    assert seconds[0] == 0.25


@pytest.mark.parametrize("count", [0, 3])
def test_a_plot_is_a_png(tmp_path, count):
    replies = [reply(at, at + 0.2, at + 0.9, at + 1, 30) for at in range(count)]
    replies.append(reply(1, 1, 1, 1.1, kind="timeout", error="late"))
    plot(replies, "title", tmp_path / "out.png", streamed=True)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_histogram_counts_every_value():
    for values in ([1.0], [2.0, 2.0], [1.0, 10.0, 100.0, 99.0]):
        edges, counts = histogram(values, 4)
        assert len(edges) == 5
        assert sum(counts) == len(values)
    assert counts == [1, 0, 1, 2]
    assert sparkline(counts) == "▅ ▅█"
    assert sparkline([]) == ""


def test_every_request_is_in_one_share():
    for load in (
        OfferedLoad(dict, 10, 5),
        OfferedLoad(dict, 10, 5, concurrency=3),
        OfferedLoad(dict, 10, 5, arrivals=list(range(10))),
        OfferedLoad(dict, 2, 5, concurrency=9),
    ):
        shares = load.shares(4)
        assert sorted(number for share in shares for number in share.numbers) == list(range(5, 5 + load.count))
        if load.arrivals is not None:
            assert {n: due for share in shares for n, due in zip(share.numbers, share.due, strict=True)}[7] == 2
        if load.concurrency is not None:
            assert sum(share.concurrency for share in shares) == load.concurrency
            assert all(share.concurrency for share in shares)


def test_arrivals_are_as_many_as_the_rate_says():
    arrivals = poisson(50, np.random.default_rng(1), None, 100)
    assert len(arrivals) == pytest.approx(5000, rel=0.1)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 100
    assert np.std(np.diff(arrivals)) == pytest.approx(1 / 50, rel=0.1)  # as of an exponential distribution
    assert len(poisson(50, np.random.default_rng(1), 10, 100)) == 10


@pytest.mark.parametrize("text", ["7", "3-9", "lognormal:20,0.5,60"])
def test_lengths_are_drawn_as_written(text):
    lengths, rng = PromptLengths.parse(text), np.random.default_rng(1)
    drawn = [lengths.draw(rng) for _ in range(2000)]
    assert str(lengths) == text
    assert {"7": {7}, "3-9": set(range(3, 10))}.get(text, set(drawn)) == set(drawn)
    if text.startswith("lognormal"):
        assert np.median(drawn) == pytest.approx(20, rel=0.1)
        assert max(drawn) <= 60


def test_prompts_follow_from_the_seed_and_differ():
    def bodies(seed: int, **more) -> list[str]:
        source = Synthetic(Asking("m"), seed, PromptLengths(20, 20), PromptLengths(1, 1), **more)
        return [json.dumps(source(number)) for number in range(50)]

    assert bodies(1) == bodies(1)
    assert not set(bodies(1)) & set(bodies(2))
    assert len(set(bodies(1))) == 50
    assert len(json.loads(bodies(1)[0])["prompt"].split()) == 20
    assert all(0 < token < 30 for body in bodies(1, vocab_size=30) for token in json.loads(body)["prompt"])


WITHOUT = """
import sys
sys.modules["rich"] = None
import bench.latency, bench.mixed, bench.monkeys
from services.cli.bench import main
sys.argv = ["toka-bench", "--help"]
main()
"""


def test_the_programs_in_bench_do_not_need_rich_and_the_command_says_what_it_needs():
    outcome = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert outcome.returncode == 2, outcome.stderr
    assert "pip install 'tokasaurus[cli]'" in outcome.stderr
    assert "Traceback" not in outcome.stderr
