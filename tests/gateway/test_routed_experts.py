"""Experts of tokens over HTTP: whole answers and streams, several samples, and after the loss of a scheduler."""

import asyncio
import base64
import io

import numpy as np
import pytest

from services.common.errors import Unavailable
from services.common.plan.routed_experts import RoutedExpertsLayout
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.codec import SampleEnding, encode_submit
from services.gateway.openai.routed_experts import encode_experts
from tests.fakes.experts import LAYERS, PER_TOKEN, fake_experts
from tests.gateway.deployment import Deployment
from tests.gateway.replicas import Replicas
from tests.gateway.test_errors import error_of
from tests.gateway.test_failover import failed, generation, tokens
from tests.gateway.test_streaming import events

PROMPT = [40 + number for number in range(35)]
ASKING = {"return_routed_experts": True, "return_token_ids": True, "seed": 3, "max_tokens": 6}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A deployment whose worker keeps experts."""
    running = Deployment(tmp_path_factory.mktemp("mixture"), worker={"routed_experts": 1}).wait_ready()
    yield running
    running.stop()


def read(text: str) -> np.ndarray:
    """Decode the experts of a choice as clients of vLLM do."""
    return np.load(io.BytesIO(base64.b64decode(text)))


def check(choice: dict, prompt: list[int], token_ids: list[int], start: int = 0) -> None:
    experts = read(choice["routed_experts"])
    assert experts.dtype == np.uint8
    np.testing.assert_array_equal(experts, fake_experts(prompt + token_ids[:-1], start))


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 2}, {"stop_token_ids": [*range(16, 2048)]}, {"n": 300}])
def test_every_choice_has_the_experts_of_its_tokens(mixture, more):
    choices = mixture.complete(prompt=PROMPT, **ASKING | more).json()["choices"]
    assert len(choices) == more.get("n", 1)
    for choice in choices:
        check(choice, PROMPT, choice["token_ids"])


def test_every_prompt_of_a_list_has_its_own(mixture):
    prompts = [PROMPT[:count] for count in (1, 16, 17)]
    choices = mixture.complete(prompt=prompts, n=2, **ASKING).json()["choices"]
    for index, choice in enumerate(choices):
        check(choice, prompts[index // 2], choice["token_ids"])


@pytest.mark.parametrize("name", ["routed_experts_prompt_start", "routed_experts_start_len"])
@pytest.mark.parametrize("start", [0, 7, len(PROMPT)])
def test_the_beginning_of_the_prompt_can_be_left_out(mixture, start, name):
    [choice] = mixture.complete(prompt=PROMPT, **ASKING, **{name: start}).json()["choices"]
    check(choice, PROMPT, choice["token_ids"], start)


def test_a_prompt_without_an_answer_has_its_experts(mixture):
    [choice] = mixture.complete(prompt=PROMPT, **ASKING | {"max_tokens": 0, "echo": True}).json()["choices"]
    np.testing.assert_array_equal(read(choice["routed_experts"]), fake_experts(PROMPT))


def test_a_chat_has_the_experts_of_its_rendered_prompt(mixture):
    answer = mixture.chat(**ASKING, n=2).json()
    for choice in answer["choices"]:
        check(choice, answer["prompt_token_ids"], choice["token_ids"])


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {})])
def test_the_last_chunk_of_a_choice_has_its_experts(mixture, path, body):
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt, ids, found = [], {0: [], 1: []}, {}
    for chunk in events(mixture, path, **body, **ASKING, n=2):
        [choice] = chunk["choices"]
        prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids") or prompt
        ids[choice["index"]] += choice.get("token_ids", [])
        assert ("routed_experts" in choice) == (choice["finish_reason"] is not None)
        if choice["finish_reason"] is not None:
            found[choice["index"]] = choice
    for index, choice in found.items():
        check(choice, prompt, ids[index])


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_of_a_request_that_does_not_ask_has_none(mixture, stream):
    body = {"prompt": PROMPT, "max_tokens": 3}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(mixture, COMPLETIONS, **body)]
    else:
        choices = mixture.complete(**body).json()["choices"]
    assert not any("routed_experts" in choice for choice in choices)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"routed_experts_prompt_start": 36}, "routed_experts_prompt_start=36: the prompt has 35 tokens"),
        ({"return_routed_experts": False, "routed_experts_prompt_start": 3}, "only allowed with return_routed_experts"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(mixture, more, message):
    assert message in error_of(mixture.complete(prompt=PROMPT, **ASKING | more), 400)["message"]


def test_a_worker_that_keeps_no_experts_is_named_in_the_error(deployment):
    error = error_of(deployment.complete(prompt=PROMPT, **ASKING), 400)
    assert error["param"] == "return_routed_experts"
    assert "started with return_routed_experts=T" in error["message"]


@pytest.mark.slow
async def test_a_scheduler_is_killed_and_the_experts_are_complete(tmp_path):
    prompts = [[100 + number, *PROMPT] for number in range(8)]
    body = {"model": "tokasaurus-builtin", "max_tokens": 400, "extra_body": ASKING | {"max_tokens": 400}}
    async with (
        Replicas.running(tmp_path, 2, worker={"step_ms": 20, "routed_experts": 1}) as pair,
        pair.deployment.async_sdk() as sdk,
    ):
        begun = [asyncio.Event() for _ in prompts]

        async def ask(number: int) -> None:
            prompt, ids, found = prompts[number], {0: [], 1: []}, {}
            async for chunk in await sdk.completions.create(prompt=prompt, n=2, stream=True, **body):
                [choice] = chunk.choices
                begun[number].set()
                ids[choice.index] += choice.model_extra["token_ids"]
                if choice.finish_reason is not None:
                    found[choice.index] = choice.model_extra
            for index, extra in found.items():
                assert len(ids[index]) == 400
                check(extra, prompt, ids[index])
            assert len(found) == 2

        asked = [asyncio.create_task(ask(number)) for number in range(len(prompts))]
        await asyncio.gather(*(each.wait() for each in begun))
        pair.schedulers[0].kill()
        await asyncio.gather(*asked)
        assert await asyncio.to_thread(pair.deployment.metric, "toka_failovers_total") > 0


# -- what is collected

LAYOUT = RoutedExpertsLayout(LAYERS, PER_TOKEN, 1)


def rows(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.uint8)[:, None].repeat(LAYOUT.token_bytes, 1)


def asking(n: int = 1, **settings) -> ActiveRequest:
    return generation(n, routed_experts=LAYOUT, **settings)


def ending(completion_tokens: int) -> SampleEnding:
    return SampleEnding("length", False, 0, 3, completion_tokens, 0, 0.0, 0.0, 0.0, None)


def test_a_resumed_sample_asks_for_the_rest_and_a_new_one_for_everything():
    running = asking(3, routed_experts_start=1)
    first, second, third = running.samples
    first.experts.add(1, rows(1, 4))  # two tokens of the prompt and two of the answer
    second.experts.add(1, rows(1, 2))
    calls = running.replace_lost(tokens(running, 3, 0, 0))
    starts = [encode_submit(call.submission).submit.request.output.routed_experts_start for call in calls]
    assert starts == [5, 1]
    assert (first.experts.tokens, second.experts.tokens, third.experts.tokens) == (4, 0, 0)
    first.experts.add(4, rows(4, 3))  # one of them is known
    assert first.experts.tokens == 6
    assert first.experts.data[:: LAYOUT.token_bytes] == bytes([1, 2, 3, 4, 5, 6])


def test_a_gap_is_an_error():
    [sample] = asking().samples
    sample.experts.add(0, rows(0, 2))
    with pytest.raises(ValueError, match="the experts of tokens 2 to 4 are missing"):
        sample.experts.add(5, rows(5, 1))


async def test_an_answer_without_all_experts_fails_and_says_so():
    running = asking()
    [sample] = running.samples
    sample.experts.add(0, rows(0, 4))
    running.finish(sample, ending(4))  # six tokens were computed
    error = await failed(running)
    assert isinstance(error, Unavailable)
    assert "the experts of 2 tokens were lost" in error.message


@pytest.mark.parametrize("completion_tokens", [0, 2])
async def test_an_answer_with_all_experts_is_complete(completion_tokens):
    running = asking()
    [sample] = running.samples
    sample.experts.add(0, rows(0, 4))
    running.finish(sample, ending(completion_tokens))
    assert await running.wait_ended() == [sample]


def test_wide_numbers_of_experts_are_two_bytes():
    layout = RoutedExpertsLayout(2, 3, 2)
    numbers = np.arange(0, 12_000, 1000, dtype=np.uint16).reshape(2, 2, 3)
    np.testing.assert_array_equal(read(encode_experts(numbers.tobytes(), layout)), numbers)
    assert read(encode_experts(b"", layout)).shape == (0, 2, 3)
