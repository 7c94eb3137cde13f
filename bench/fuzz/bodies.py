"""Valid bodies for every endpoint, from which invalid bodies are made."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from bench.chaos.questions import MODEL

_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _SCHEMA}}


def completion(random: Random, mark: str) -> dict[str, Any]:
    """Return a completion whose answer is known."""
    prompt: Any = f"{mark} counts {random.randrange(1000)} sheep on {random.choice(('a hill', 'a road', 'é 🙂'))}"
    if random.random() < 0.3:
        prompt = [random.randrange(16, 2048) for _ in range(random.choice((1, 3, 40)))]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": random.choice((1, 2, 4, 8)), "return_token_ids": True}
    body |= {"temperature": random.choice((0, 0.7)), "seed": random.getrandbits(40)}
    body |= {"n": random.choice((1, 1, 1, 2, 5))}
    return body | ({"stream": True} if random.random() < 0.4 else {})


def _chat(random: Random, mark: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"What is {mark}?"}]
    body = {"model": MODEL, "messages": messages, "max_completion_tokens": 3, "temperature": 0, "stream": False}
    more: tuple[dict[str, Any], ...] = (
        {"return_token_ids": True},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[ab]{2}"}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"tools": [_TOOL], "tool_choice": "auto"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": mark}]}]},
        {"stop": ["a", "\n\n"], "logit_bias": {"50": 5}, "frequency_penalty": 0.5, "metadata": {"k": "v"}},
        {"timeout": 5, "priority": 1, "cache_salt": "s", "user": "u"},
    )
    return body | random.choice(more)


def _options(random: Random, mark: str) -> dict[str, Any]:
    more: tuple[dict[str, Any], ...] = (
        {"echo": True, "logprobs": 2, "stream": False},
        {"prompt": [f"{mark} a", "b"], "best_of": 6, "stream": False},
        {"stop": [mark, "e"], "stop_token_ids": [20, 30], "ignore_eos": True, "min_tokens": 1},
        {"logit_bias": {"20": -100, "21": 3.5}, "presence_penalty": 1, "repetition_penalty": 1.1},
        {"prompt_logprobs": 1, "stream": False},
        {"top_p": 0.5, "top_k": 5, "min_p": 0.1, "truncate_prompt_tokens": 3},
        {"skip_special_tokens": False, "add_special_tokens": False, "include_stop_str_in_output": True},
        {"structured_outputs": {"json": _SCHEMA}},
        {"n": 60, "max_tokens": 1},
    )
    return completion(random, mark) | random.choice(more)


def _response(random: Random, mark: str) -> dict[str, Any]:
    body = {"model": MODEL, "input": f"Tell of {mark}", "max_output_tokens": 3, "temperature": 0, "store": False}
    more: tuple[dict[str, Any], ...] = (
        {"store": True},
        {"stream": True},
        {"instructions": "Be short.", "metadata": {"k": "v"}},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": mark}]}]},
        {"tools": [{"type": "function", "name": "look", "parameters": _SCHEMA, "strict": True}]},
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}}},
        {"previous_response_id": f"resp_{random.getrandbits(96):024x}"},
    )
    return body | random.choice(more)


def _message(random: Random, mark: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Tell of {mark}"}], "max_tokens": 3,
            "temperature": 0}  # fmt: skip
    more: tuple[dict[str, Any], ...] = (
        {"stream": True},
        {"system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": mark}]}], "stop_sequences": ["a"]},
        {"tools": [{"name": "look", "input_schema": _SCHEMA, "strict": True}], "tool_choice": {"type": "auto"}},
        {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}},
    )
    return body | random.choice(more)


def _tokenize(random: Random, mark: str) -> dict[str, Any]:
    if random.random() < 0.5:
        return {"prompt": f"{mark} é", "add_special_tokens": True, "return_token_strs": True}
    return {"messages": [{"role": "user", "content": mark}], "add_generation_prompt": True}


def _detokenize(random: Random, mark: str) -> dict[str, Any]:
    return {"tokens": [random.randrange(2048) for _ in range(random.choice((0, 1, 50)))]}


def _batch(random: Random, mark: str) -> dict[str, Any]:
    return {"input_file_id": f"file-{random.getrandbits(96):024x}", "endpoint": "/v1/completions",
            "completion_window": "24h", "metadata": {"k": "v"}}  # fmt: skip


def _together(random: Random, mark: str) -> dict[str, Any]:
    return {"messages": [[{"role": "user", "content": f"{mark} {n}"}] for n in range(2)], "model": MODEL,
            "max_completion_tokens": 2}  # fmt: skip


# Path, function and weight of each kind of body.
RIGHT: tuple[tuple[str, Callable[[Random, str], dict[str, Any]], int], ...] = (
    ("/v1/completions", completion, 4),
    ("/v1/completions", _options, 5),
    ("/v1/chat/completions", _chat, 9),
    ("/v1/responses", _response, 4),
    ("/v1/messages", _message, 3),
    ("/tokenize", _tokenize, 1),
    ("/detokenize", _detokenize, 1),
    ("/v1/batches", _batch, 1),
    ("/v1/chat/completions/batch", _together, 1),
)


def right(random: Random, mark: str) -> tuple[str, dict[str, Any]]:
    """Return a path and a valid body for it."""
    [(path, make, _)] = random.choices(RIGHT, weights=[weight for *_, weight in RIGHT])
    return path, make(random, mark)


def lines(random: Random, mark: str) -> bytes:
    """Return the file of a Batch job, in which some lines are wrong."""
    rows = []
    for number in range(random.choice((1, 2, 5))):
        body = completion(random, mark) | {"stream": False}
        rows.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}))
    return "\n".join(rows).encode()
