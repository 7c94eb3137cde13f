"""Generate: prompts of every kind in, tokens and text out."""

import asyncio
import contextlib
import time
from itertools import takewhile

import grpc
import pytest

from services.common.text.tokenizer import Tokenizer
from tests.fakes.model import FakeShape, chosen_logprob, continuation, reply_script, top_token_ids
from tests.fakes.worker import FakeWorker
from tests.scheduler.service import PROMPT, start
from tokasaurus.scheduler.v1 import generate_pb2 as g

SEED = g.Sampling(seed=11)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("builtin")


def tokens_prompt(tokens=PROMPT):
    return g.TokenPrompt(token_ids=tokens)


async def test_a_token_prompt_gets_the_tokens_it_always_gets(service):
    samples = await service.generate(tokens=tokens_prompt(), sampling=SEED, stopping=g.Stopping(max_tokens=30), n=3)
    for index in range(3):
        expected = continuation(service.worker.shape, PROMPT, 30, seed=11, sample_index=index)
        assert samples[index].tokens == expected
        assert samples[index].text == ""
        finish = samples[index].finish
        assert finish.reason == g.FINISH_REASON_LENGTH
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (43, 30)
        assert finish.usage.cached_prompt_tokens == (42 if index else 0)
    assert service.worker.model.prefilled_tokens == 43 + 2


async def test_acceptance_comes_first_and_names_the_request(service):
    call = service.stub.Generate(
        g.GenerateRequest(request_id="mine", tokens=tokens_prompt(), stopping=g.Stopping(max_tokens=1))
    )
    first = await call.read()
    assert (first.accepted.request_id, first.accepted.prompt_tokens) == ("mine", 43)
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_text_goes_in_and_comes_out(tokenizer):
    reply = tokenizer.encode(" The answer is 4 — naïve, n'est-ce pas? 漢字", add_special_tokens=False)
    worker = FakeWorker(script=reply_script([*reply, 0]))
    async with start(worker=worker) as service:
        samples = await service.generate(text="What is 2 + 2?")
        assert samples[0].text == " The answer is 4 — naïve, n'est-ce pas? 漢字"
        assert samples[0].tokens == [*reply, 0]
        assert samples[0].finish.stop_token_id == 0
        assert samples[0].finish.usage.prompt_tokens == len(tokenizer.encode("What is 2 + 2?"))


async def test_a_chat_is_rendered_with_the_models_template(service, tokenizer):
    chat = g.ChatPrompt(messages=[g.ChatMessage(role="user", content="Hi")])
    samples = await service.generate(chat=chat, sampling=SEED, stopping=g.Stopping(max_tokens=3))
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert samples[0].tokens == continuation(service.worker.shape, prompt, 3, seed=11)


async def test_a_stop_string_ends_the_text_before_it_also_across_tokens(tokenizer):
    reply = tokenizer.encode("one two three four five", add_special_tokens=False)
    async with start(worker=FakeWorker(script=reply_script(reply))) as service:
        stopping = g.Stopping(max_tokens=50, strings=["nope", "ee fo"])
        samples = await service.generate(text="Count", stopping=stopping)
        assert samples[0].text == "one two thr"
        assert samples[0].finish.reason == g.FINISH_REASON_STOP
        assert samples[0].finish.stop_string.index == 1
        whole = tokenizer.vocabulary.text_bytes(samples[0].tokens)
        assert whole[: len(whole) - samples[0].finish.stop_string.trailing_bytes] == b"one two thr"


async def test_a_stop_string_in_the_prompt_does_not_count(tokenizer):
    reply = tokenizer.encode(" b c", add_special_tokens=False)
    async with start(worker=FakeWorker(script=reply_script([*reply, 1]))) as service:
        samples = await service.generate(text="stop here", stopping=g.Stopping(strings=["here"]))
        assert samples[0].text == " b c"


async def test_min_tokens_ignores_what_would_end_the_answer_sooner():
    async with start(worker=FakeWorker(FakeShape(), script=reply_script([500, 0, 501, 502, 0]))) as service:
        samples = await service.generate(tokens=tokens_prompt(), stopping=g.Stopping(min_tokens=3))
        assert samples[0].tokens == [500, 0, 501, 502, 0]


async def test_ignore_eos_and_stop_tokens(service):
    expected = continuation(service.worker.shape, PROMPT, 20, seed=11)
    stopping = g.Stopping(max_tokens=20, token_ids=[expected[6]], ignore_eos=True)
    samples = await service.generate(tokens=tokens_prompt(), sampling=SEED, stopping=stopping)
    assert samples[0].tokens == expected[:7]
    assert samples[0].finish.stop_token_id == expected[6]


async def test_logprobs_come_beside_their_tokens(service):
    output = g.Output(logprobs=True, top_logprobs=3)
    samples = await service.generate(
        tokens=tokens_prompt(), sampling=SEED, stopping=g.Stopping(max_tokens=8), output=output, n=2
    )
    for sample in samples.values():
        assert sample.chosen == pytest.approx(chosen_logprob(sample.tokens).tolist())
        assert sample.top_counts == [3] * 8
        assert sample.top_ids == [t for token in sample.tokens for t in top_token_ids(token, 3, 2048).tolist()]


async def test_cancelling_the_call_ends_the_request(service):
    service.worker.hold()
    call = service.stub.Generate(g.GenerateRequest(tokens=tokens_prompt(), n=4))
    await call.read()
    await service.worker.received(1)
    call.cancel()
    load = await service.until_load(lambda load: not load.running_sequences and not load.waiting_sequences)
    assert load.in_use_pages == 0
    assert load.counters.sequences_cancelled == 4
    service.worker.release()


async def test_deadlines_of_requests_and_calls(service):
    service.worker.hold()
    past = int(time.time() * 1000) - 1
    samples = await service.generate(tokens=tokens_prompt(), deadline_unix_ms=past)
    assert samples[0].finish.reason == g.FINISH_REASON_DEADLINE
    call = service.stub.Generate(g.GenerateRequest(tokens=tokens_prompt()), timeout=0.2)
    reasons = []
    with contextlib.suppress(grpc.aio.AioRpcError):  # the client's own timer may come first
        reasons = [sample.finish.reason async for news in call for sample in news.outputs.samples]
    assert reasons == [g.FINISH_REASON_DEADLINE] or await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    service.worker.release()


async def test_a_deadline_that_is_so_far_away_is_kept_whatever_the_clients_clock_says(service):
    long_ago, far_away = 1, int((time.time() + 86400) * 1000)
    samples = await service.generate(tokens=tokens_prompt(), deadline_in_ms=0, deadline_unix_ms=far_away)
    assert samples[0].finish.reason == g.FINISH_REASON_DEADLINE
    samples = await service.generate(
        tokens=tokens_prompt(),
        stopping=g.Stopping(max_tokens=2),
        deadline_in_ms=86_400_000,
        deadline_unix_ms=long_ago,
    )
    assert samples[0].finish.reason == g.FINISH_REASON_LENGTH
    assert (await service.generate(tokens=tokens_prompt(), deadline_in_ms=2**64 - 1))[0].tokens


async def test_many_at_once_each_get_their_own(service):
    async def one(number: int) -> None:
        prompt = [*PROMPT[: number % 40], 50 + number]
        samples = await service.generate(
            tokens=tokens_prompt(prompt), sampling=g.Sampling(seed=number), stopping=g.Stopping(max_tokens=12)
        )
        assert samples[0].tokens == continuation(service.worker.shape, prompt, 12, seed=number)

    await asyncio.gather(*(one(number) for number in range(96)))


async def test_a_resumed_sample_goes_on_without_a_gap(service):
    expected = continuation(service.worker.shape, PROMPT, 20, seed=11, sample_index=2)
    samples = await service.generate(
        tokens=tokens_prompt([*PROMPT, *expected[:8]]),
        sampling=SEED,
        stopping=g.Stopping(max_tokens=20),
        resume=g.Resume(generated_tokens=8, sample_index=2),
    )
    assert samples[0].tokens == expected[8:]
    assert samples[0].finish.usage.completion_tokens == 20


async def test_the_text_of_a_resumed_sample_goes_on_where_it_was(tokenizer):
    reply = tokenizer.encode("one two three four five", add_special_tokens=False)
    begun = next(n for n in range(1, len(reply)) if tokenizer.vocabulary.text_bytes(reply[:n]).endswith(b" three"))

    async with start(worker=FakeWorker(script=lambda *_: 0)) as service:
        samples = await service.generate(
            tokens=tokens_prompt([*PROMPT, *reply[:begun]]),
            resume=g.Resume(generated_tokens=begun),
            output=g.Output(text=True),
            stopping=g.Stopping(strings=["ee four"]),
        )
        # "ee" was held back by the scheduler that had begun: nobody has sent it yet.
        assert samples[0].text == "ee"


async def test_compiled_stop_strings_are_kept_within_bounds(service, monkeypatch):
    monkeypatch.setattr("services.scheduler.api.model._AUTOMATA_BYTES", 100_000)
    model = service.server.model
    texts = [[f"{number} " + "abcdefgh" * 100] for number in range(20)]
    for _ in range(2):  # what a huge one displaces leaves room for as many as before
        made = [model.automaton(strings) for strings in texts]
        newest = zip(reversed(texts), reversed(made), strict=True)
        kept = list(takewhile(lambda one: model.automaton(one[0]) is one[1], newest))
        sizes = [automaton.nbytes for _, automaton in kept]
        assert len(sizes) > 1
        assert sum(sizes) <= 100_000 < sum(sizes) + max(sizes)
        huge = model.automaton(["abcdefgh" * 500])
        assert huge.nbytes > 100_000
        assert model.automaton(["abcdefgh" * 500]) is not huge
        assert model.automaton(texts[-1]) is not made[-1]


async def test_penalties_reach_the_worker_and_know_what_was_generated_before(service):
    service.worker.record = True
    sampling = g.Sampling(seed=11, repetition_penalty=1.5, frequency_penalty=-2, presence_penalty=0.25)
    resumed = g.Resume(generated_tokens=3)
    await service.generate(tokens=tokens_prompt(), sampling=sampling, stopping=g.Stopping(max_tokens=2), n=2)
    await service.generate(tokens=tokens_prompt(), sampling=sampling, stopping=g.Stopping(max_tokens=5), resume=resumed)
    admissions = [admission for plan in service.worker.plans for admission in plan.admissions]
    assert len(admissions) == 3
    for admission in admissions:
        sent = admission.sampling.parameters
        assert (sent.repetition_penalty, sent.frequency_penalty, sent.presence_penalty) == (1.5, -2, 0.25)
    assert [admission.prompt_tokens for admission in admissions] == [0, 0, len(PROMPT) - 3]


async def test_text_may_end_behind_the_stop_instead_of_before_it(tokenizer):
    reply = tokenizer.encode("one two three four five", add_special_tokens=False)
    output = g.Output(include_stop=True)
    async with start(worker=FakeWorker(script=reply_script([*reply, 0]))) as service:
        stopping = g.Stopping(max_tokens=50, strings=["nope", "ee fo"])
        samples = await service.generate(text="Count", stopping=stopping, output=output)
        assert samples[0].text == "one two three fo"
        stopping = g.Stopping(max_tokens=50, token_ids=[reply[1]])
        samples = await service.generate(text="Count", stopping=stopping, output=output)
        assert samples[0].text == tokenizer.vocabulary.text_bytes(reply[:2]).decode()


async def test_text_may_show_special_tokens(tokenizer):
    reply = tokenizer.encode("one two", add_special_tokens=False)
    name = tokenizer.decode([0], skip_special_tokens=False)
    async with start(worker=FakeWorker(script=reply_script([*reply, 0]))) as service:
        for special, text in ((True, f"one two{name}"), (False, "one two")):
            output = g.Output(special_tokens=special, include_stop=True)
            samples = await service.generate(text="Count", output=output)
            assert samples[0].text == text


async def test_a_prompts_log_probabilities_come_with_the_first_sample(service):
    call = service.stub.Generate(
        g.GenerateRequest(
            tokens=tokens_prompt(), output=g.Output(prompt_logprobs=2), stopping=g.Stopping(max_tokens=3), n=2
        )
    )
    outputs = [output async for response in call for output in response.outputs.samples]
    pieces = [piece for output in outputs for piece in output.prompt_logprobs]
    assert {output.sample_index for output in outputs if output.prompt_logprobs} == {0}
    assert [place for piece in pieces for place in range(piece.start, piece.start + len(piece.ranks))] == [
        *range(1, 43)
    ]
    chosen = [value for piece in pieces for value in piece.logprobs.chosen]
    assert chosen == chosen_logprob(PROMPT[1:]).tolist()
    tops = [token for piece in pieces for token in piece.logprobs.top_token_ids]
    assert tops == [token for chosen in PROMPT[1:] for token in top_token_ids(chosen, 2, 2048)]
    assert sum(len(output.token_ids) for output in outputs) == 6


async def test_a_worker_without_log_probabilities_of_prompts_is_named():
    async with start(FakeShape(prompt_logprobs=False)) as service:
        request = g.GenerateRequest(tokens=tokens_prompt(), output=g.Output(prompt_logprobs=0))
        with pytest.raises(grpc.aio.AioRpcError, match=r"WorkerInfo\.prompt_logprobs") as caught:
            await service.stub.Generate(request).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
