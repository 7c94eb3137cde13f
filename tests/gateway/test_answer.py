"""The way of a request from its prompts to its response."""

import asyncio
import tracemalloc
from types import SimpleNamespace

import numpy as np
import orjson

from services.common.config import GatewayConfig
from services.common.errors import InvalidRequest
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.codec import ModelFacts, PromptScores, SampleEnding
from services.gateway.engine.request import Grammar, PromptRequest, Settings
from services.gateway.engine.text import TextEngine
from services.gateway.http.guard import Guard
from services.gateway.http.request import Caller
from services.gateway.openai.answer import Answer
from services.gateway.openai.chat_shape import ChatShape
from services.gateway.openai.shapes import CompletionShape
from services.gateway.openai.transcript import Piece

FACTS = ModelFacts("m", 0, 2048, 2048, True, 20, "", "1.5")


async def test_a_grammar_that_fails_in_the_middle_of_a_stream_is_named_as_it_was_sent(tokenizer):
    grammar = Grammar("lark", "start: /x/", "response_format", composed=True)
    job = PromptRequest("r", "m", np.array([5], np.uint32), 9, None, Settings(grammar=grammar))
    generation, config, text = ActiveRequest([job], streaming=True), GatewayConfig(), TextEngine(tokenizer)

    async def generate(jobs, streaming) -> ActiveRequest:
        return generation

    fleet = SimpleNamespace(generate=generate)
    metrics = SimpleNamespace(request_began=lambda samples, max_tokens, prompts: None)
    gateway = SimpleNamespace(config=config, guard=Guard(config), fleet=fleet, text=text, metrics=metrics)
    generation.on_accepted()
    stream = await Answer(gateway, [job], ChatShape("r", FACTS, None), {}, Caller("", "")).respond(stream=True)
    generation.add_tokens(generation.samples[0], [5], None)
    generation.fail(InvalidRequest("at 3(1): it takes too long", field="sampling.grammar", reason="INVALID_GRAMMAR"))
    sent = []

    async def receive() -> dict:
        return await asyncio.get_running_loop().create_future()  # nobody leaves

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))

    await stream({"type": "http"}, receive, send)
    text.stop()
    *_, last = b"".join(sent).removesuffix(b"\n\n").split(b"\n\n")
    error = orjson.loads(last.removeprefix(b"data: "))["error"]
    assert (error["param"], error["code"]) == ("response_format", "invalid_grammar")
    assert error["message"] == "it takes too long"


async def test_prompt_logprobs_are_computed_once_for_all_samples_of_a_prompt(tokenizer):
    settings, prompt = Settings(n=3, prompt_logprobs=0, requested_prompt_logprobs=0), np.array([5, 6, 7], np.uint32)
    jobs = [PromptRequest(f"r-{number}", "m", prompt + 3 * number, 9, None, settings) for number in range(2)]
    generation, config, text = ActiveRequest(jobs, streaming=False), GatewayConfig(), TextEngine(tokenizer)
    for number in range(2):
        logprobs, ranks, nothing = np.full(2, -number, np.float32), np.ones(2, np.uint32), np.zeros((2, 0))
        generation.add_prompt_scores(number, PromptScores(1, logprobs, ranks, nothing, nothing))
    for sample in generation.samples:
        sample.new_ids = [9]
        generation.finish(sample, SampleEnding("length", False, 0, 3, 1, 0, 0.0, 0.0, 0.0, None))

    async def generate(jobs, streaming) -> ActiveRequest:
        return generation

    metrics = SimpleNamespace(request_began=lambda *given: None, end_to_end=SimpleNamespace(observe=lambda value: None))
    fleet, named, name = SimpleNamespace(generate=generate), [], text.token_text
    text.token_text = lambda token: named.append(token) or name(token)
    gateway = SimpleNamespace(config=config, guard=Guard(config), fleet=fleet, text=text, metrics=metrics)
    response = await Answer(gateway, jobs, CompletionShape("r", FACTS, None), {}, Caller("", "")).respond(stream=False)
    text.stop()
    assert named == [6, 7, 9, 10]
    returned = [choice["prompt_logprobs"] for choice in orjson.loads(response.body)["choices"]]
    assert returned[0][0] is None
    assert [list(entry) for entry in returned[0][1:]] == [["6"], ["7"]]
    assert [list(entry) for entry in returned[5][1:]] == [["9"], ["10"]]
    assert (returned[:3], returned[3:]) == (returned[:1] * 3, returned[5:] * 3)


def test_a_stored_choice_takes_little_more_memory_than_its_text():
    generation = ActiveRequest(
        [PromptRequest("r", "m", np.array([5], np.uint32), 9, None, Settings(n=1000))], streaming=False
    )
    for choice in generation.samples:
        choice.ending = SampleEnding("length", False, 0, 1, 1, 0, 0.0, 0.0, 0.0, None)
    shape, piece = CompletionShape("r", FACTS, None), Piece("hello", [])
    tracemalloc.start()
    kept = [shape.choice(choice, piece) for choice in generation.samples]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 3 * sum(map(len, kept))
