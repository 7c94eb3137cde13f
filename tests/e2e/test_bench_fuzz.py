"""The fuzzers, small, and that they notice what they are there to notice."""

import asyncio
import contextlib
import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import pytest

from bench.fuzz.asks import Ask
from bench.fuzz.canary import canary
from bench.fuzz.certificates import CertificateFuzzer
from bench.fuzz.config import FuzzConfig
from bench.fuzz.connection import Reply
from bench.fuzz.credentials import Credentials
from bench.fuzz.expected import Expected
from bench.fuzz.findings import Findings, Wrong
from bench.fuzz.http import HttpFuzzer
from bench.fuzz.illegal import KINDS
from bench.fuzz.judge import Judge
from bench.fuzz.kept import Kept
from bench.fuzz.messages import damaged, mutated
from bench.fuzz.mirror import Mirror
from bench.fuzz.models import ModelFuzzer
from bench.fuzz.scheduler import SchedulerFuzzer
from bench.fuzz.target import target
from bench.fuzz.values import broken, write
from bench.fuzz.values import mutated as mutated_value
from bench.random_plans import RandomPlans
from services.common.model.files import BUILTIN
from services.common.plan.codec import decode_limits, encode_plan
from tests.fakes.model import FakeModel, FakeShape, Violation
from tokasaurus.scheduler.v1 import generate_pb2

CONFIG = FuzzConfig(seed=3, concurrency=16)
OTHER = FakeShape(eos_every=60, first_token=17)  # answers otherwise


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_a_deployment_stands_it_and_a_wrong_function_is_noticed(tmp_path):
    found = Findings(tmp_path, CONFIG.seed)
    with target(tmp_path, keys=True) as running:
        await running.wait_ready()
        http = await HttpFuzzer(CONFIG, running.url, running.credentials, found).run(300)
        grpc = await SchedulerFuzzer(CONFIG, running, found).run(200)
        await running.look(found)
        assert found.shown == []
        assert http["statuses"]["200"] > 50
        assert http["statuses"]["401"] > 10
        assert grpc["statuses"]["OK"] > 10
        assert grpc["statuses"]["UNAUTHENTICATED"] > 1

        (tmp_path / "others").mkdir()
        of_others = Findings(tmp_path / "others", CONFIG.seed)
        await HttpFuzzer(CONFIG, running.url, running.credentials, of_others, Expected(OTHER)).run(30)
        await SchedulerFuzzer(CONFIG, running, of_others, Expected(OTHER)).run(30)
        assert of_others.kinds["http other text"] > 0
        assert of_others.kinds["grpc other text"] > 0
        assert list((tmp_path / "others").glob("finding-http-*.request"))
    running.look_at_logs(found)
    assert found.shown == []


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_operators_routes_are_left_out_without_keys(tmp_path):
    """A pause, or an abort of all requests, stopped valid requests."""
    found = Findings(tmp_path, CONFIG.seed)
    with target(tmp_path, keys=False) as running:
        await running.wait_ready()
        await HttpFuzzer(CONFIG, running.url, running.credentials, found).run(300)
    assert found.shown == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ports_of_a_replica_accept_the_certificates_that_they_should(tmp_path):
    found = Findings(tmp_path, CONFIG.seed)
    on_tcp = (("tcp", "tcp"),)
    figures = await CertificateFuzzer(CONFIG, tmp_path, found, on_tcp).run(60)
    assert found.shown == []
    assert figures["statuses"]["right: OK"] > 6
    assert figures["statuses"]["expired: UNAVAILABLE"] == 6


# -- what is noticed of an answer over HTTP

RIGHT = {"model": "m", "prompt": [20, 30], "max_tokens": 3, "seed": 1, "temperature": 0, "n": 1}
ERROR = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


def answer(expected: Expected) -> dict:
    tokens = expected.tokens(RIGHT["prompt"], 3)
    text = expected.text(tokens)
    return {"choices": [{"index": 0, "token_ids": tokens, "text": text, "finish_reason": "length"}]}


def look(expected: Expected, status: int, content: object, *, right: bool = False, **changed) -> None:
    data = f"POST / HTTP/1.1\r\n\r\n{canary(5)}".encode()
    ask = Ask(5, "right", "POST", "/v1/completions", data, "", RIGHT if right else None)
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    reply = Reply(status, {b"content-type": b"application/json"}, body, whole=True)
    for name, value in changed.items():
        setattr(reply, name, value)
    Judge(expected, Kept()).look(ask, reply)


def test_right_answers_pass(expected):
    look(expected, 200, answer(expected), right=True)
    look(expected, 400, ERROR)
    look(expected, 400, {"error": ERROR["error"] | {"message": f"no {canary(5)}"}})


@pytest.mark.parametrize(
    ("kind", "status", "content", "changed"),
    [
        ("status", 500, ERROR, {}),
        ("status", 503, ERROR, {}),
        ("status", 504, ERROR, {}),
        ("error", 400, {"detail": "no"}, {}),
        ("error", 429, ERROR, {}),
        ("no JSON", 400, b"<html>", {}),
        ("closed", 0, b"", {"whole": False}),
        ("cut", 200, b'{"a"', {"whole": False}),
        ("no HTTP", 200, {}, {"broken": "what is this"}),
        ("leak", 200, {"text": canary(6)}, {}),
        ("leak", 400, {"error": ERROR["error"] | {"message": canary(6)}}, {}),
        ("leak", 200, {}, {"headers": {b"x-request-id": canary(6).encode()}}),
        ("status", 200, b'data: {"error": {"message": "m", "type": "server_error", "param": null, "code": null}}\n\n',
         {"headers": {b"content-type": b"text/event-stream"}}),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_noticed(expected, kind, status, content, changed):
    with pytest.raises(Wrong) as caught:
        look(expected, status, content, **changed)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "change", [{"text": "Other"}, {"token_ids": [5, 6, 7]}, {"finish_reason": "stop"}, {"index": 1}]
)
def test_another_text_is_noticed(expected, change):
    told = answer(expected)
    told["choices"][0] |= change
    with pytest.raises(Wrong) as caught:
        look(expected, 200, told, right=True)
    assert caught.value.kind == "other text"


@contextlib.contextmanager
def always(status: int, body: bytes) -> Iterator[str]:
    """A gateway that says the same whatever it is asked, but for its document."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            described = self.path == "/openapi.json"
            said = b'{"paths": {"/health": {"get": {}}}}' if described else body
            with contextlib.suppress(ConnectionError):
                self.send_response(200 if described else status)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

        do_POST = do_GET

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_gateway_that_answers_500_is_found(tmp_path):
    found = Findings(tmp_path, 1)
    said = json.dumps(ERROR).encode()
    with always(500, said) as url:
        config = FuzzConfig(seed=3, concurrency=16, answer_seconds=3)  # it waits for the end of what has none
        fuzzer = await asyncio.to_thread(HttpFuzzer, config, url, Credentials(None), found)
        await fuzzer.run(20)
    assert found.kinds["http status"] > 10
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["kind"] == "status"


# -- files of models


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_models_are_read_or_refused(tmp_path):
    found = Findings(tmp_path, 1)
    figures = ModelFuzzer(FuzzConfig(seed=1), tmp_path, found).run(12)
    assert found.shown == []
    assert figures["refused"] > 0


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        ({"stage": "text", "raised": "Traceback: KeyError"}, "traceback"),
        ({"stage": "text", "raised": "Traceback: MemoryError"}, "memory"),
        ({"stage": "card", "refused": "it is wrong"}, "message"),
        ({"stage": "card", "refused": "config.json: it is wrong\nand long"}, "message"),
    ],
)
def test_a_reader_without_a_sentence_is_found(failed, kind, tmp_path, monkeypatch):
    class Fake:
        def read(self, directory):
            return [failed]

        def close(self):
            pass

    monkeypatch.setattr("bench.fuzz.models.Reader", Fake)
    monkeypatch.setattr("bench.fuzz.models.make_bases", lambda directory: [BUILTIN])
    found = Findings(tmp_path, 1)
    ModelFuzzer(FuzzConfig(seed=1), tmp_path, found).run(1)
    assert found.kinds == {f"models {kind}": 1}


# -- what is sent


def test_a_seed_decides_what_is_sent():
    def made(seed: int) -> list[bytes]:
        random = Random(seed)
        document = {"a": [1, {"b": "c"}], "d": None}
        message = generate_pb2.GenerateRequest(text="a", n=2)
        values = [broken(random, write(random, mutated_value(random, document))) for _ in range(50)]
        return values + [damaged(random, mutated(random, message).SerializeToString()) for _ in range(50)]

    assert made(1) == made(1) != made(2)


# -- illegal plans

SHAPE = FakeShape(page_count=128, max_slots=8, max_tokens_per_step=64, max_context_tokens=128, hydragen=False,
                  max_micro_batches=1, eos_token_id=-1)  # fmt: skip


# The checker knows nothing of prompt_tokens, the worker does.
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"more prompt than tokens"}))
def test_every_kind_of_illegal_plan_is_illegal(kind):
    """By the scheduler's checker, instead of whichever legal plan it is put."""
    info, random = SHAPE.worker_info(), Random(5)
    model, mirror, plans = FakeModel(SHAPE), Mirror(128), RandomPlans(decode_limits(info), 4)
    for _ in range(12):
        plan = encode_plan(plans.next()[0])
        broken_plan = mirror.next(plan, plan.step)
        KINDS[kind](random, broken_plan, info, mirror.used)
        with pytest.raises(Violation):
            copy.deepcopy(model).apply(broken_plan)
        mirror.apply(plan, model.apply(plan))


def test_a_history_goes_on_where_another_stream_was_ended():
    info = SHAPE.worker_info()
    model, mirror, plans = FakeModel(SHAPE), Mirror(128), RandomPlans(decode_limits(info), 4)
    for _ in range(40):
        plan = encode_plan(plans.next()[0])
        again = mirror.again()
        assert len(again.admissions) == len(mirror.used)
        assert all(each.cached_tokens < len(each.token_ids) for each in again.admissions)
        mirror.apply(plan, model.apply(plan))
