"""A sample that is cut anywhere and goes on at another scheduler is the sample that was never cut."""

import asyncio

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.model.files import read_card
from services.common.rpc.status import from_rpc_error, from_status
from services.common.text.tokenizer import Tokenizer
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker, reply_script
from tests.properties import examples
from tests.scheduler.service import PROMPT, Sample, Service, session, start
from tokasaurus.scheduler.v1 import generate_pb2 as g

SHAPE = FakeShape(first_token=261, vocab_size=2048, eos_every=40)  # tokens with text, and an end now and then
LONGEST = 50


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def service(loop):
    running = start(SHAPE)
    yield loop.run(running.__aenter__())
    loop.run(running.__aexit__(None, None, None))


async def whole(service: Service, n: int, request: dict) -> dict[int, Sample]:
    return await service.generate(tokens=g.TokenPrompt(token_ids=PROMPT), n=n, **request)


async def rest(service: Service, begun: list[int], index: int, request: dict) -> Sample:
    """What comes behind the tokens ``begun`` of sample ``index``."""
    resume = g.Resume(generated_tokens=len(begun), sample_index=index)
    prompt = g.TokenPrompt(token_ids=[*PROMPT, *begun])
    return (await service.generate(tokens=prompt, resume=resume, **request))[0]


def same_end(one: g.Finish, other: g.Finish) -> None:
    assert (one.reason, one.WhichOneof("stopped_by")) == (other.reason, other.WhichOneof("stopped_by"))
    assert (one.stop_token_id, one.stop_string) == (other.stop_token_id, other.stop_string)
    assert one.usage.prompt_tokens == other.usage.prompt_tokens == len(PROMPT)
    assert one.usage.completion_tokens == other.usage.completion_tokens


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    most=st.integers(1, LONGEST),
    least=st.sampled_from([0, 0, 5, 20]),
    stops=st.lists(st.tuples(st.integers(0, 4 * LONGEST), st.integers(1, 12)), max_size=3),  # places in the text
    stop_tokens=st.lists(st.integers(0, LONGEST), max_size=2),  # places among the tokens
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7]),
    cut=st.integers(0, LONGEST),
    top=st.integers(0, 2),
)
def test_a_cut_is_not_seen(loop, service, most, least, stops, stop_tokens, seed, temperature, cut, top):
    request = {
        "sampling": g.Sampling(seed=seed, temperature=temperature),
        "stopping": g.Stopping(max_tokens=LONGEST, ignore_eos=True),
        "output": g.Output(logprobs=True, top_logprobs=top, text=True),
    }
    longest = loop.run(whole(service, 2, request))[1]
    strings = {longest.text[start : start + length] for start, length in stops if start < len(longest.text)}
    request["stopping"] = g.Stopping(
        max_tokens=most,
        min_tokens=min(least, most),
        strings=sorted(strings - {""}),
        token_ids=[longest.tokens[place] for place in stop_tokens if place < LONGEST],
        ignore_eos=bool(seed % 2),
    )
    samples = loop.run(whole(service, 2, request))
    for index, uncut in samples.items():
        for begun in {min(cut, len(uncut.tokens)), len(uncut.tokens)}:
            resumed = loop.run(rest(service, uncut.tokens[:begun], index, request))
            assert resumed.tokens == uncut.tokens[begun:]
            assert resumed.chosen == uncut.chosen[begun:]
            assert resumed.top_ids == uncut.top_ids[begun * top :]
            assert uncut.text.endswith(resumed.text)
            same_end(resumed.finish, uncut.finish)


async def test_several_samples_of_which_none_has_begun_begin_elsewhere_together():
    async with start() as service:
        request = {"sampling": g.Sampling(seed=3, temperature=1.0), "stopping": g.Stopping(max_tokens=10)}
        samples = await whole(service, 5, request)
        resume = g.Resume(sample_index=2)
        others = await service.generate(tokens=g.TokenPrompt(token_ids=PROMPT), n=3, resume=resume, **request)
        assert [others[index].tokens for index in range(3)] == [samples[index].tokens for index in (2, 3, 4)]


async def test_on_a_session_too_an_end_that_was_lost_comes_at_once():
    async with start() as service, session(service) as client:
        stopping = g.Stopping(max_tokens=3, token_ids=[77])
        prompt = g.TokenPrompt(token_ids=[*PROMPT, 500, 77])
        await client.submit(9, tokens=prompt, stopping=stopping, resume=g.Resume(generated_tokens=2))
        await client.finished(9)
        assert 9 in client.accepted
        finish = client.samples[9].finish
        assert (finish.reason, finish.stop_token_id) == (g.FINISH_REASON_STOP, 77)
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (len(PROMPT), 2)
        assert client.samples[9].tokens == []
        assert (await service.load()).counters.requests_accepted == 0  # no step was needed


@pytest.mark.parametrize("stop", ["token", "string"])
async def test_stops_across_the_seam_count_from_min_tokens_on(stop):
    tokenizer = Tokenizer.load("builtin")
    reply = tokenizer.encode(" one two three four five", add_special_tokens=False)
    async with start(worker=FakeWorker(script=reply_script(reply))) as service:
        stops = {"strings": ["two three four"]} if stop == "string" else {"token_ids": [reply[1]]}
        for least in (0, len(reply)):
            request = {"stopping": g.Stopping(max_tokens=500, min_tokens=least, **stops), "output": g.Output(text=True)}
            [uncut] = (await whole(service, 1, request)).values()
            assert uncut.finish.reason == g.FINISH_REASON_STOP
            assert (len(uncut.tokens) > len(reply)) == (least > 0)
            for begun in range(1, len(uncut.tokens) + 1):
                resumed = await rest(service, uncut.tokens[:begun], 0, request)
                assert resumed.tokens == uncut.tokens[begun:]
                same_end(resumed.finish, uncut.finish)


async def test_a_grammar_goes_on_where_it_was():
    async with start() as service:
        grammar = g.Grammar(regex="[a-f]{30}")
        request = {"sampling": g.Sampling(seed=5, grammar=grammar), "stopping": g.Stopping(max_tokens=100)}
        [uncut] = (await whole(service, 1, request)).values()
        for begun in (1, len(uncut.tokens) // 2, len(uncut.tokens)):
            resumed = await rest(service, uncut.tokens[:begun], 0, request)
            assert resumed.tokens == uncut.tokens[begun:]
            same_end(resumed.finish, uncut.finish)


async def test_what_the_grammar_forbids_is_not_resumed_and_nobody_else_notices():
    tokenizer = Tokenizer.load("builtin")
    wrong, end = tokenizer.encode("xyz", add_special_tokens=False), read_card("builtin").eos_token_ids[0]
    async with start() as service, session(service) as client:
        grammar = g.Grammar(regex="[a-f]{30}")
        request = {"sampling": g.Sampling(seed=5, grammar=grammar), "stopping": g.Stopping(max_tokens=100)}
        [uncut] = (await whole(service, 1, request)).values()
        beside = asyncio.create_task(rest(service, uncut.tokens[:2], 0, request))
        error = from_status((await rest(service, wrong, 0, request)).finish.error)
        assert isinstance(error, InvalidRequest)
        assert error.field == "resume.generated_tokens"
        assert "cannot be resumed" in error.message
        assert (await beside).tokens == uncut.tokens[2:]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rest(service, [*uncut.tokens, end, *wrong], 0, request)
        refused = from_rpc_error(raised.value)
        assert isinstance(refused, InvalidRequest)
        assert refused.field == "resume.generated_tokens"
        prompt = g.TokenPrompt(token_ids=[*PROMPT, *wrong])
        await client.submit(4, tokens=prompt, resume=g.Resume(generated_tokens=len(wrong)), **request)
        await client.finished(4)
        assert from_status(client.samples[4].finish.error).field == "resume.generated_tokens"


async def test_a_prompt_is_scored_without_what_was_generated():
    async with start() as service:
        output = g.Output(prompt_logprobs=0)
        request = {"sampling": g.Sampling(seed=1), "stopping": g.Stopping(max_tokens=10), "output": output}
        [uncut] = (await whole(service, 1, request)).values()
        call = service.stub.Generate(
            g.GenerateRequest(
                tokens=g.TokenPrompt(token_ids=[*PROMPT, *uncut.tokens[:4]]),
                resume=g.Resume(generated_tokens=4),
                **request,
            )
        )
        outputs = [output async for response in call for output in response.outputs.samples]
        scored = [piece for output in outputs for piece in output.prompt_logprobs]
        assert sum(len(piece.ranks) for piece in scored) == len(PROMPT) - 1
        assert [token for output in outputs for token in output.token_ids] == uncut.tokens[4:]
