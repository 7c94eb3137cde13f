"""The requests of the clients. Each is greedy or has a seed, so there is one right answer."""

import random
from dataclasses import dataclass, field
from typing import Any

from bench.chaos.answer import Answer
from bench.problems import read_problems
from services.cli.bench.problems import few_shot_prompts

_SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"enum": ["book", "pen", "apple"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["item", "count"],
    "additionalProperties": False,
}
MODEL = "tokasaurus-builtin"
_STOPS = ([". "], ["er", "\n"], ["####"], ["a", " is"])
_LENGTHS = (4, 8, 16, 32, 64)


@dataclass(frozen=True, eq=False)
class Question:
    """A request, without ``stream``, which does not change the answer."""

    number: int
    path: str
    body: dict[str, Any]
    right: Answer = field(default_factory=Answer)


def make_questions(count: int, seed: int) -> list[Question]:
    """Return ``count`` questions, which depend only on the arguments."""
    chance = random.Random(seed)
    problems = read_problems()
    long_prompts = few_shot_prompts(problems, count)
    questions = []
    for number in range(count):
        problem = chance.choice(problems)
        body: dict[str, Any] = {"model": MODEL, "max_tokens": chance.choice(_LENGTHS), "temperature": 0}
        chat = chance.random() < 0.5
        if chat:
            body["messages"] = [{"role": "user", "content": problem.question}]
        else:
            body["prompt"] = long_prompts[number] if chance.random() < 0.1 else problem.prompt
        body |= _features(chance, number, chat)
        questions.append(Question(number, "/v1/chat/completions" if chat else "/v1/completions", body))
    return questions


def _features(chance: random.Random, number: int, chat: bool) -> dict[str, Any]:
    """Return the parameters in which requests differ."""
    body: dict[str, Any] = {}
    if chance.random() < 0.4:
        body |= {"temperature": 0.8, "seed": number, "top_p": chance.choice((1, 0.9))}
        if chance.random() < 0.5:
            body["n"] = chance.choice((2, 3, 4))
    if chance.random() < 0.25:
        body["stop"] = chance.choice(_STOPS)
    if chance.random() < 0.25:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    if chance.random() < 0.15:
        body["frequency_penalty"] = 0.5
    if chat and chance.random() < 0.25:
        schema = {"name": "purchase", "schema": _SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body
