"""Grammars are proven before their requests are queued, and reach the worker; nobody waits for another's."""

import asyncio
import json
import sys
import time
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status

from services.common.errors import AlreadyExists, InvalidRequest, Unavailable
from services.common.plan.types import SamplingSettings
from services.common.rpc.status import from_rpc_error, from_status
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.scheduler.api.pending_grammars import PendingGrammars
from services.scheduler.api.unchecked_requests import UncheckedRequests
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.grammar import child, walk
from services.scheduler.grammar.checker import GrammarChecker
from services.scheduler.grammar.compiler import GrammarCompiler, GrammarLimits
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker
from tests.scheduler.service import PROMPT, session, start, status_of
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2, session_pb2

TOKENS = g.TokenPrompt(token_ids=PROMPT)
MOST = g.Stopping(max_tokens=3)
CITY = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
# Two that no limit of the library's stops: it works on each for far longer than anybody waits.
ENDLESS = "start: " + " ".join(f"r{i}" for i in range(1000)) + "\n"
ENDLESS += "\n".join(f'r{i}: (r{(i + 1) % 1000} | "a"){{0,100000}}' for i in range(1000))
PATTERNS = {f"^a{{0,{number}}}(x|y)*{number}$": {} for number in range(400)}
SLOW = json.dumps({"type": "object", "patternProperties": PATTERNS})
SLOW_TOO = SLOW.replace("(x|y)", "(x|z)")
# Compiled in about as long as its second mask takes, while the first one is quick; no limit of the library's counts it.
SLOW_LATER = 'start: "x" T0\n' + "\n".join(f'T{i}: (T{i + 1} "c")*' for i in range(400)) + '\nT400: "a"'

WRONG = [
    (g.Grammar(), "has no kind"),
    (g.Grammar(json_schema="{"), "cannot be read as JSON"),
    (g.Grammar(json_schema="[1]"), "must be a JSON object"),
    (g.Grammar(json_schema="false"), "must be a JSON object"),
    (g.Grammar(json_schema="[" * 100_000), "cannot be read as JSON"),
    (g.Grammar(json_schema='{"type": "strin"}'), "the JSON schema cannot be followed: Invalid type: strin"),
    (g.Grammar(json_schema='{"not": {}}'), 'Unimplemented keys: ["not"]'),
    (g.Grammar(json_schema='{"not": {}, "x-guidance": {"lenient": true}}'), 'Unimplemented keys: ["not"]'),
    (g.Grammar(json_schema='{"type": "string", "format": "iri"}'), "Unknown format: iri"),
    (g.Grammar(json_schema='{"$ref": "http://example.com/x"}'), "not present in a registry"),
    (g.Grammar(json_schema='{"$ref": "#"}'), "no text matches it"),
    (g.Grammar(json_schema='{"x": "' + "a" * 300_000 + '"}'), "expected at most 262144"),
    (g.Grammar(regex="("), 'the regular expression cannot be followed: at 1(8): invalid regex "(": unclosed group'),
    (g.Grammar(regex="(?=a)b"), "look-around"),
    (g.Grammar(regex=r"[^\s\S]"), "no text matches it"),
    (g.Grammar(choices=g.Choices()), "at least one text"),
    (g.Grammar(lark=" "), "needs a rule `start`"),
    (g.Grammar(lark='start: "a" b'), 'unknown name: "b"'),
    (g.Grammar(lark="start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
    (g.Grammar(lark='root: "a"'), "start"),
    (g.Grammar(lark="start: a\na[lazy, temperature=-1]: /x/"), "attribute 'temperature' has no effect"),
    (g.Grammar(lark="start [ capture ] : /x/"), "attribute 'capture' has no effect"),
    (g.Grammar(lark='start: a\na[suffix="]",stop_capture="s"]: /x/'), "attribute 'stop_capture' has no effect"),
    (g.Grammar(lark='start: a "z"\na[stop="y"]: /x/'), "attribute 'stop' has no effect"),
]
RIGHT = [
    g.Grammar(json_schema=CITY),
    g.Grammar(json_schema="true"),
    g.Grammar(json_schema='{"enum": [' + ",".join(f'"value {index}"' for index in range(5000)) + "]}"),
    g.Grammar(regex=r"a/b\d+|\x41\n"),
    g.Grammar(regex=""),
    g.Grammar(choices=g.Choices(texts=["", 'a"b\\', "line\nbreak", "\x00\x07\x7f", "naïve ☃ 😀", "</think>"])),
    g.Grammar(choices=g.Choices(texts=[f"choice {index}" for index in range(5000)])),
    g.Grammar(lark='start: "a" start | "b"'),
    g.Grammar(lark='start: a "stop[capture]: b"\na[suffix="stop=", max_tokens=5]: /[capture]*/'),
]


def asking(grammar: g.Grammar, **fields) -> dict:
    return {"tokens": TOKENS, "sampling": g.Sampling(seed=1, grammar=grammar), "stopping": MOST, **fields}


async def refusal(service, **fields):
    error = await status_of(service.stub.Generate(g.GenerateRequest(**fields)))
    return from_status(rpc_status.from_call(error))


async def test_a_grammar_that_does_not_compile_is_refused_with_the_reason_in_one_line():
    async with start() as service:
        for grammar, part in WRONG:
            error = await refusal(service, **asking(grammar))
            assert isinstance(error, InvalidRequest), (grammar, error)
            assert error.field == "sampling.grammar"
            assert part in error.message, error.message
            assert "\n" not in error.message
            assert len(error.message) < 400
        assert (await service.load()).counters.requests_accepted == 0


async def test_a_grammar_that_compiles_reaches_the_worker_with_every_sample(service):
    service.worker.record = True
    for grammar in RIGHT:
        await service.generate(**asking(grammar, n=2))
    sent = [admission.sampling.grammar for plan in service.worker.plans for admission in plan.admissions]
    assert len(sent) == 2 * len(RIGHT)
    assert sent[::2] == sent[1::2]
    assert "{1,32}" in sent[0]  # blanks are bounded
    assert len(set(sent)) == len(RIGHT)


async def test_a_resumed_sample_keeps_its_grammar_and_says_what_was_generated(service):
    service.worker.record = True
    await service.generate(**asking(g.Grammar(regex="x+"), resume=g.Resume(generated_tokens=2)))
    [admission] = [admission for plan in service.worker.plans for admission in plan.admissions]
    assert admission.prompt_tokens == len(PROMPT) - 2
    assert admission.sampling.grammar == "start: /x+/"


async def test_what_does_not_go_with_a_grammar_is_named(service):
    x = g.Grammar(regex="x")
    error = await refusal(service, **asking(x, stopping=g.Stopping(ignore_eos=True)))
    assert (error.field, "no token can follow its end" in error.message) == ("stopping.ignore_eos", True)
    error = await refusal(service, **asking(x, stopping=g.Stopping(min_tokens=1)))
    assert (error.field, "leave one out" in error.message) == ("stopping.min_tokens", True)
    await service.generate(**asking(x, stopping=g.Stopping(max_tokens=3, strings=["x"], token_ids=[50])))


async def test_a_worker_without_grammars_is_said_to_be_one():
    async with start(FakeShape(grammars=False)) as service:
        assert not (await service.stub.GetModel(observe_pb2.GetModelRequest())).model.grammars
        error = await refusal(service, **asking(g.Grammar(regex="x")))
        assert (error.field, error.message[:31]) == ("sampling.grammar", "the worker does not support gra")
        await service.generate(tokens=TOKENS, stopping=MOST)


async def test_a_model_says_that_it_takes_grammars_and_a_forecast_proves_them(service):
    assert (await service.stub.GetModel(observe_pb2.GetModelRequest())).model.grammars
    request = g.GenerateRequest(**asking(g.Grammar(regex="(")))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.stub.Forecast(observe_pb2.ForecastRequest(request=request))
    assert from_rpc_error(raised.value).field == "sampling.grammar"
    request = g.GenerateRequest(**asking(g.Grammar(regex="x")))
    assert (await service.stub.Forecast(observe_pb2.ForecastRequest(request=request))).finish_step


async def test_requests_of_a_session_pass_one_whose_grammar_takes_its_whole_time(monkeypatch):
    monkeypatch.setattr("services.scheduler.grammar.compiler.GrammarLimits.__new__.__defaults__", (1.0, 1024**3))
    async with start() as service, session(service) as client:
        await client.submit(0, **asking(g.Grammar(json_schema=SLOW_TOO), n=2))
        await client.submit(2, **asking(g.Grammar(json_schema=SLOW)))
        await client.submit(3, tokens=TOKENS, stopping=MOST)
        await client.submit(1, tokens=TOKENS, stopping=MOST)  # the handle of a sample that waits
        await client.finished(3)
        assert 0 not in client.rejected
        await client.submit(4, **asking(g.Grammar(regex="y")))
        for handle in (0, 1, 2, 4):
            await client.decided(handle)
        for handle in (0, 2):
            assert "takes more than 1 s to compile" in from_status(client.rejected[handle]).message
        assert isinstance(from_status(client.rejected[1]), AlreadyExists)
        await client.finished(4)
        await client.submit(0, tokens=TOKENS, stopping=MOST)  # its handle is free again
        await client.finished(0)


async def test_a_cancel_waits_for_its_submit_that_waits_for_its_grammar(service):
    async with session(service) as client:
        service.worker.hold()
        await client.submit(5, **asking(g.Grammar(regex="new[0-9]"), n=2))
        await client.send(cancel=session_pb2.Cancel(handles=[6]))
        await client.decided(5)
        await client.finished(6)
        assert client.samples[6].finish.reason == g.FINISH_REASON_CANCELLED
        service.worker.release()
        await client.finished(5)
        assert client.samples[5].finish.reason == g.FINISH_REASON_LENGTH


async def test_a_session_that_sends_no_more_hears_of_a_grammar_that_is_being_proven(service):
    async with session(service) as client:
        await client.submit(0, **asking(g.Grammar(regex="last")))
        await client.call.done_writing()
        await client.finished(0)


async def test_a_client_that_leaves_while_its_grammar_is_proven_leaves_nothing_behind():
    async with start() as service:
        async with session(service) as client:
            await client.submit(0, **asking(g.Grammar(regex="gone")))
        assert not (await service.load()).waiting_sequences
        await service.generate(**asking(g.Grammar(regex="gone")))


@pytest.fixture
async def checker():
    checker = GrammarChecker("builtin", [0, 1], GrammarLimits(cpu_seconds=1, memory_bytes=200 * 1024**2))
    yield checker
    await checker.close()


async def test_a_grammar_that_many_ask_for_compiles_once_and_is_known_then(checker, monkeypatch):
    compiled = []
    run = GrammarCompiler.compile
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, text: compiled.append(text) or run(self, text))
    await asyncio.gather(*(checker.check("start: /x/", "it") for _ in range(50)))
    await checker.check("start: /x/", "it")
    assert compiled == ["start: /x/"]
    assert checker.is_cached("start: /x/")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="it cannot be followed"):
            await checker.check("start: y", "it")
    assert compiled == ["start: /x/", "start: y"]


async def test_a_grammar_that_takes_too_much_memory_is_refused_and_the_next_one_is_not(checker):
    nested = "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(24)) + '\nT24: "a"'
    with pytest.raises(InvalidRequest, match=r"more than (200 MiB|1 s) to compile"):
        await checker.check(nested, "it")
    await checker.check("start: /x/", "it")


def test_a_grammar_whose_later_tokens_take_long_is_found_out(monkeypatch):
    """A bound between the masks of this one, some 100 ms, and those of ordinary ones."""
    monkeypatch.setattr(walk, "_MOST_MASK_S", 0.02)
    grammars = Grammars(Tokenizer.load("builtin"), [0, 1])
    assert "takes too long" in walk.mask_time_problem(grammars.matcher(SLOW_LATER), [0, 1])
    assert not walk.mask_time_problem(grammars.matcher("start: /(.|\\n)*/"), [0, 1])


async def test_a_grammar_that_needs_more_stack_than_workers_have_is_refused(checker):
    chain = "start: t0\n" + "\n".join(f't{i}: t{i + 1} "c"' for i in range(3000)) + '\nt3000: "a"'
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await checker.check(chain, "it")
    await checker.check("start: /x/", "it")


async def test_clients_take_turns_and_what_nobody_waits_for_is_not_begun(checker, monkeypatch):
    begun, gate = [], asyncio.Event()

    async def compile(self, text):
        begun.append(text)
        await gate.wait()
        return ""

    monkeypatch.setattr(GrammarChecker, "_compile", compile)
    many = [asyncio.create_task(checker.check(f"m{i}", "it", "many")) for i in range(6)]
    await asyncio.sleep(0)
    shared = asyncio.create_task(checker.check("m5", "it", "one"))
    other = asyncio.create_task(checker.check("o", "it", "other"))
    await asyncio.sleep(0)
    assert begun == ["m0", "m1"]
    many[3].cancel()
    await asyncio.gather(many[3], return_exceptions=True)
    gate.set()
    await asyncio.gather(*(task for task in many if task is not many[3]), shared, other)
    assert begun == ["m0", "m1", "m2", "m5", "o", "m4"]
    monkeypatch.setattr("services.scheduler.grammar.checker._MOST_UNCHECKED", 1)  # nothing else waits
    await checker.check("m3", "it", "many")  # asked for again
    assert begun[-1] == "m3"


async def test_a_deadline_is_kept_while_a_grammar_is_proven(monkeypatch):
    async def never(self, text):
        await asyncio.Event().wait()

    monkeypatch.setattr(GrammarChecker, "_compile", never)
    async with start() as service, session(service) as client:
        asked = asking(g.Grammar(regex="x"), deadline_unix_ms=int(time.time() * 1000) + 50)
        await client.submit(0, **asked)
        await client.finished(0)
        assert client.samples[0].finish.reason == g.FINISH_REASON_DEADLINE
        asked["deadline_unix_ms"] = int(time.time() * 1000) + 50
        outputs = await service.generate(**asked)
        assert outputs[0].finish.reason == g.FINISH_REASON_DEADLINE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps such limits")
def test_a_child_asks_for_no_more_memory_than_it_may_have(monkeypatch):
    """More than a hard limit would be an error."""
    asked = []
    monkeypatch.setattr(child.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    monkeypatch.setattr(child.resource, "setrlimit", lambda _, limits: asked.append(limits))
    child.limit_memory(1 << 30)
    assert asked == [(1 << 20, 1 << 20)]


async def test_cancels_of_a_sample_that_waits_for_its_grammar_are_kept_once(checker):
    submitted, acted = asyncio.Event(), []
    engine = SimpleNamespace(submit=lambda _, aborted: submitted.set(), act_on=lambda *what: acted.append(what))
    pending = PendingGrammars(engine, UncheckedRequests(), checker, sink=1)
    request = Request("it", np.zeros(1, np.uint32), SamplingSettings(grammar="start: /x/"), n=2, handle=5)
    pending.begin(request, "it")
    for _ in range(100):
        pending.act_on([5, 6], Scheduler.cancel)
    pending.act_on([6, 7], Scheduler.end)
    await submitted.wait()
    assert acted == [(1, [7], Scheduler.end), (1, [5, 6], Scheduler.cancel), (1, [6], Scheduler.end)]
    pending.act_on([5], Scheduler.cancel)
    assert acted[-1] == (1, [5], Scheduler.cancel)


async def test_a_child_that_was_killed_is_replaced(checker, monkeypatch):
    started, start_one = [], GrammarCompiler.start

    async def start(*how):
        started.append(await start_one(*how))
        return started[-1]

    monkeypatch.setattr(GrammarCompiler, "start", start)
    await checker.check("start: /x/", "it")
    [compiler] = started
    await compiler.close()
    await checker.check("start: /y/", "it")
    assert len(started) == 2


async def test_who_waits_when_the_scheduler_stops_is_told(checker):
    waiting = asyncio.create_task(checker.check(ENDLESS, "it"))
    await asyncio.sleep(0)
    await checker.close()
    with pytest.raises(Unavailable):
        await waiting


async def test_a_tokenizer_without_an_end_of_sequence_has_no_grammars():
    checker = GrammarChecker("builtin", [])
    with pytest.raises(Unavailable, match="no end-of-sequence token"):
        await checker.check("start: /x/", "it")
    await checker.close()


async def test_a_sample_that_goes_on_after_a_lost_worker_keeps_its_grammar():
    worker = FakeWorker(FakeShape())
    worker.record = True
    async with start(worker=worker) as service:
        worker.hold()
        asked = asking(g.Grammar(regex="z*"), stopping=g.Stopping(max_tokens=60))
        running = asyncio.create_task(service.generate(**asked))
        worker.release(10)
        await worker.received(11)
        worker.crash()
        worker.release()
        assert (await running)[0].finish.usage.prompt_tokens == len(PROMPT)
        sent = [admission for plan in worker.plans for admission in plan.admissions]
        assert [admission.sampling.grammar for admission in sent] == ["start: /z*/"] * 2
        assert [admission.prompt_tokens for admission in sent] == [0, len(PROMPT)]
