"""Everything that is wrong with a request is said, with the field's path; nothing is passed over."""

import math

import grpc
import pytest
from grpc_status import rpc_status

from services.common.errors import InvalidRequest
from services.common.rpc.status import from_status
from tests.fakes.model import FakeShape
from tests.scheduler.service import start, status_of
from tokasaurus.scheduler.v1 import generate_pb2 as g

TOKENS = g.TokenPrompt(token_ids=[50, 51, 52, 53])

WRONG = [
    ({}, "prompt", "no prompt"),
    ({"tokens": g.TokenPrompt()}, "tokens.token_ids", "empty"),
    ({"tokens": g.TokenPrompt(token_ids=[1, 2, 3, 2048])}, "tokens.token_ids[3]", "2048"),
    ({"text": ""}, "text", "empty"),
    ({"chat": g.ChatPrompt()}, "chat.messages", "no messages"),
    ({"chat": g.ChatPrompt(messages=[g.ChatMessage(content="x")])}, "chat.messages[0].role", "role"),
    ({"chat": g.ChatPrompt(messages=[g.ChatMessage(role="pope", content="x")])}, "chat.messages", "unknown role"),
    ({"tokens": g.TokenPrompt(token_ids=[50] * 2048)}, "prompt", "2048 tokens and the model's context is 2048"),
    ({"sampling": g.Sampling(temperature=math.nan)}, "sampling.temperature", "nan"),
    ({"sampling": g.Sampling(temperature=-1)}, "sampling.temperature", "-1"),
    ({"sampling": g.Sampling(temperature=101)}, "sampling.temperature", "0 to 100"),
    ({"sampling": g.Sampling(top_p=0)}, "sampling.top_p", "more than 0"),
    ({"sampling": g.Sampling(top_p=1.5)}, "sampling.top_p", "1.5"),
    ({"sampling": g.Sampling(min_p=-0.5)}, "sampling.min_p", "0 to 1"),
    ({"sampling": g.Sampling(repetition_penalty=0)}, "sampling.repetition_penalty", "0.01 to 100"),
    ({"sampling": g.Sampling(repetition_penalty=math.inf)}, "sampling.repetition_penalty", "0.01 to 100"),
    ({"sampling": g.Sampling(frequency_penalty=2.5)}, "sampling.frequency_penalty", "-2 to 2"),
    ({"sampling": g.Sampling(presence_penalty=math.nan)}, "sampling.presence_penalty", "-2 to 2"),
    ({"sampling": g.Sampling(logit_bias_token_ids=[1])}, "sampling.logit_bias_values", "the same number"),
    (
        {"sampling": g.Sampling(logit_bias_token_ids=[1, 4000], logit_bias_values=[1, 1])},
        "sampling.logit_bias_token_ids[1]",
        "4000",
    ),
    (
        {"sampling": g.Sampling(logit_bias_token_ids=[1], logit_bias_values=[math.inf])},
        "sampling.logit_bias_values[0]",
        "finite",
    ),
    (
        {"sampling": g.Sampling(logit_bias_token_ids=[7, 7], logit_bias_values=[1, 1])},
        "sampling.logit_bias_token_ids[1]",
        "twice",
    ),
    ({"stopping": g.Stopping(max_tokens=0)}, "stopping.max_tokens", "at least 1"),
    ({"stopping": g.Stopping(max_tokens=2045)}, "stopping.max_tokens", "2049 tokens"),
    ({"stopping": g.Stopping(max_tokens=2, min_tokens=3)}, "stopping.min_tokens", "at most"),
    ({"stopping": g.Stopping(strings=["x"] * 17)}, "stopping.strings", "at most 16"),
    ({"stopping": g.Stopping(strings=["x", ""])}, "stopping.strings[1]", "empty"),
    ({"stopping": g.Stopping(strings=["x" * 5000])}, "stopping.strings[0]", "4096"),
    (
        {"sampling": g.Sampling(logit_bias_token_ids=[1] * (2**18 + 1), logit_bias_values=[1] * (2**18 + 1))},
        "sampling.logit_bias_token_ids",
        "at most 262144",
    ),
    (
        {"sampling": g.Sampling(logit_bias_token_ids=range(20000), logit_bias_values=[1] * 20000), "n": 60},
        "sampling.logit_bias_token_ids",
        "20000 tokens for each of n=60 samples",
    ),
    ({"stopping": g.Stopping(token_ids=[50] * 4097)}, "stopping.token_ids", "at most 4096"),
    ({"stopping": g.Stopping(token_ids=[9999])}, "stopping.token_ids[0]", "9999"),
    ({"output": g.Output(top_logprobs=2)}, "output.top_logprobs", "needs logprobs"),
    ({"output": g.Output(logprobs=True, top_logprobs=21)}, "output.top_logprobs", "0 to 20"),
    ({"output": g.Output(prompt_logprobs=21)}, "output.prompt_logprobs", "0 to 20"),
    ({"output": g.Output(prompt_logprobs_start=1)}, "output.prompt_logprobs_start", "needs prompt_logprobs"),
    (
        {"output": g.Output(prompt_logprobs=0, prompt_logprobs_start=4)},
        "output.prompt_logprobs_start",
        "less than the 4 tokens of the prompt",
    ),
    ({"output": g.Output(logprobs=True, logprobs_mode=3)}, "output.logprobs_mode", "3 is not a LogprobsMode"),
    ({"sampling": g.Sampling(thinking=g.ThinkingBudget())}, "sampling.thinking.tokens", "not set"),
    (
        {"sampling": g.Sampling(thinking=g.ThinkingBudget(tokens=4))},
        "sampling.thinking.end_token_id",
        "no single token </think>: set end_token_id",
    ),
    (
        {"sampling": g.Sampling(thinking=g.ThinkingBudget(tokens=4, end_token_id=5, opened=False))},
        "sampling.thinking.begin_token_id",
        "no single token <think>: set begin_token_id",
    ),
    (
        {"sampling": g.Sampling(thinking=g.ThinkingBudget(tokens=4, end_token_id=2048, opened=True))},
        "sampling.thinking.end_token_id",
        "ids 0 to 2047",
    ),
    (
        {"output": g.Output(special_tokens=True), "stopping": g.Stopping(strings=["x"])},
        "output.special_tokens",
        "leave one out",
    ),
    ({"n": 0}, "n", "n is 0"),
    ({"n": 100}, "n", "max_samples_per_request"),
    ({"stragglers": g.Stragglers(end_after=0)}, "stragglers.end_after", "end_after is 0: expected 1 to n=1"),
    ({"stragglers": g.Stragglers(park_after=5), "n": 4}, "stragglers.park_after", "park_after is 5: expected 1 to n=4"),
    (
        {"stragglers": g.Stragglers(park_after=2, end_after=2), "n": 4},
        "stragglers.park_after",
        "park_after is 2: expected less than end_after=2",
    ),
    ({"priority": 9}, "priority", "9"),
    ({"admission": 3}, "admission", "3 is not an AdmissionMode"),
    ({"length_class": "x" * 65}, "length_class", "65 characters: expected at most 64"),
    ({"fairness_key": "x" * 257}, "fairness_key", "257 characters: expected at most 256"),
    ({"request_id": "x" * 300}, "request_id", "256"),
    ({"resume": g.Resume(generated_tokens=4)}, "resume.generated_tokens", "original prompt"),
    ({"resume": g.Resume(generated_tokens=2), "n": 2}, "n", "one sample"),
    ({"resume": g.Resume(generated_tokens=1), "text": "hello"}, "resume", "token ids"),
    (
        {"resume": g.Resume(generated_tokens=3), "stopping": g.Stopping(max_tokens=2)},
        "resume.generated_tokens",
        "has already finished",
    ),
    ({"resume": g.Resume(sample_index=2**32 - 1), "n": 2}, "resume.sample_index", "32 bits"),
]


@pytest.fixture(scope="module", params=[None])
def requests():
    return [(fields, field, part) for fields, field, part in WRONG]


async def test_every_error_names_its_field_and_what_was_expected(requests):
    async with start(max_samples_per_request=64) as service:
        for fields, field, part in requests:
            if fields and not {"tokens", "text", "chat"} & set(fields):
                fields = {"tokens": TOKENS, **fields}
            error = await status_of(service.stub.Generate(g.GenerateRequest(**fields)))
            mine = from_status(rpc_status.from_call(error))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (fields, mine.message)
            assert isinstance(mine, InvalidRequest)
            assert mine.field == field, (fields, mine.message)
            assert part in mine.message, (fields, mine.message)
        assert (await service.load()).counters.requests_accepted == 0


async def test_too_long_for_the_context_has_a_reason_of_its_own():
    async with start() as service:
        for fields in ({"tokens": g.TokenPrompt(token_ids=[50] * 3000)}, {"stopping": g.Stopping(max_tokens=9999)}):
            error = await status_of(service.stub.Generate(g.GenerateRequest(**{"tokens": TOKENS, **fields})))
            assert from_status(rpc_status.from_call(error)).reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_too_large_for_the_pool_says_what_to_raise():
    async with start(FakeShape(page_count=4)) as service:
        stopping = g.Stopping(max_tokens=100)
        error = await status_of(service.stub.Generate(g.GenerateRequest(tokens=TOKENS, stopping=stopping)))
        assert "kv_cache_num_tokens" in error.details()
        samples = await service.generate(tokens=TOKENS)  # as much as there is
        assert samples[0].finish.usage.completion_tokens == 4 * 16 + 1 - 4


async def test_what_an_older_worker_does_not_take_is_refused():
    asked = [
        ({"sampling": g.Sampling(thinking=g.ThinkingBudget(tokens=1, end_token_id=5))}, "sampling.thinking"),
        ({"output": g.Output(logprobs=True, logprobs_mode=g.LOGPROBS_MODE_PROCESSED)}, "output.logprobs_mode"),
    ]
    async with start(FakeShape(processed_logprobs=False, thinking_budgets=False)) as service:
        for fields, field in asked:
            error = await status_of(service.stub.Generate(g.GenerateRequest(tokens=TOKENS, **fields)))
            mine = from_status(rpc_status.from_call(error))
            assert (error.code(), mine.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            assert "newer worker" in mine.message
        raw = g.Output(logprobs=True, logprobs_mode=g.LOGPROBS_MODE_RAW)
        assert (await service.generate(tokens=TOKENS, output=raw, stopping=g.Stopping(max_tokens=1)))[0].chosen


async def test_another_model_is_not_found():
    async with start() as service:
        error = await status_of(service.stub.Generate(g.GenerateRequest(tokens=TOKENS, model="other")))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        samples = await service.generate(tokens=TOKENS, model="tokasaurus-builtin", stopping=g.Stopping(max_tokens=1))
        assert len(samples[0].tokens) == 1
