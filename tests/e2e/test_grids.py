"""Replicas, stages and ranks in any mix, as real processes: nothing is lost, and tokens are transformers'."""

import asyncio
import itertools
import random

import grpc
import openai
import pytest

from bench.server import serve
from services.launcher.readiness import grpc_ready
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint
from tests.e2e.test_reference import TOKENS, Reference, greedy_request, prompt_of
from tokasaurus.scheduler.v1 import scheduler_pb2_grpc

pytestmark = pytest.mark.slow

FLAGS = {"device": "cpu", "dtype": "float32", "page_size": 16, "max_tokens_per_forward": 64}
CHECKPOINTS = {
    "llama": {"architecture": "llama", "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"architecture": "qwen2", "tied": True},
    "qwen3": {"architecture": "qwen3"},
}
LENGTHS = 1, 16, 17, 50, 90, 200
GRIDS = [*itertools.product((1, 2), repeat=3), (1, 4, 1), (1, 1, 4)]
QUESTION = "How many apples are left"


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model(request, tmp_path_factory) -> tuple[str, Reference]:
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), **CHECKPOINTS[request.param], num_hidden_layers=5)
    return str(directory), Reference(directory)


async def generate(address: str, prompt: list[int], tokens: int = TOKENS, most: int = TOKENS) -> list[int]:
    """An answer of ``tokens`` tokens; it is cancelled as soon as ``most`` are there."""
    request, answer = greedy_request(prompt), []
    request.stopping.max_tokens = tokens
    async with grpc.aio.insecure_channel(address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(request)
        async for response in call:
            answer += [token for sample in response.outputs.samples for token in sample.token_ids]
            if len(answer) >= most:
                call.cancel()
                break
    return answer


@pytest.mark.grids
@pytest.mark.parametrize(("dp_size", "tp_size", "pp_size"), GRIDS)
async def test_any_mix_gives_the_tokens_of_transformers(model, dp_size, tp_size, pp_size):
    directory, reference = model
    prompts = [prompt_of(length, reference.tokenizer.vocab_size, seed) for seed in range(2) for length in LENGTHS]
    question = reference.tokenizer.encode(QUESTION)
    with serve(model=directory, dp_size=dp_size, tp_size=tp_size, pp_size=pp_size, **FLAGS) as server:
        host, port = server.grpc_address.split(":")
        schedulers = [f"{host}:{int(port) + replica}" for replica in range(dp_size)]
        for scheduler in schedulers:  # a gateway is ready with one
            await grpc_ready(scheduler)
        asked = [generate(schedulers[index % dp_size], prompt) for index, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*asked)
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
        settings = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        choice = client.completions.create(model=server.model, prompt=QUESTION, **settings).choices[0]
        text, scored = question + reference.greedy(question), {"max_tokens": 1, "extra_body": {"prompt_logprobs": 0}}
        again = client.completions.create(model=server.model, prompt=text, **scored).choices[0]
    ranks = [entry[str(token)]["rank"] for token, entry in zip(text[1:], again.prompt_logprobs[1:], strict=True)]
    assert ranks[len(question) - 1 :] == [1] * TOKENS
    assert answers == [reference.greedy(prompt) for prompt in prompts]
    assert choice.text == reference.text(question, reference.greedy(question))


async def test_random_arrivals_and_cancels_through_two_stages_lose_nothing(tmp_path):
    """A few slots and pages, so that requests wait, are preempted, and leave in the middle of a prompt or an answer."""
    directory = make_checkpoint(tmp_path, "llama")
    reference, draw = Reference(directory), random.Random(0)
    asked = []
    for seed in range(40):
        prompt = prompt_of(draw.randint(1, 120), reference.tokenizer.vocab_size, seed)
        # A third is cancelled, after 1 to 12 tokens of many.
        asked.append((prompt, 800, draw.randint(1, 12)) if draw.random() < 1 / 3 else (prompt, TOKENS, TOKENS))
    small = FLAGS | {"max_seqs_per_forward": 8, "kv_cache_num_tokens": 16 * 80}
    with serve(model=directory, pp_size=2, **small) as server:
        answers = await asyncio.gather(*(generate(server.grpc_address, *each) for each in asked))
        restarts = server.metric("toka_worker_restarts_total")
    for (prompt, _, most), answer in zip(asked, answers, strict=True):
        count = min(len(answer), TOKENS)
        assert most <= len(answer) <= 800
        assert answer[:count] == reference.greedy(prompt)[:count]
    assert restarts == 0
