"""Hundreds of schemas through the whole server: an answer that ends satisfies its schema, a refusal names it."""

import asyncio
import json
from collections import Counter

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S
from tests.gateway.grammar.schemas import by_hand, drawn, refused

pytestmark = pytest.mark.slow

MOST = 240  # tokens
ABREAST = 64  # requests
TAKEN = by_hand()
REFUSED = refused()
DRAWN = drawn(300 - len(TAKEN) - len(REFUSED))


async def outcomes(url: str, schemas: list[dict], no_blanks: dict[str, int]) -> list[tuple[dict, httpx.Response]]:
    room = asyncio.Semaphore(ABREAST)
    async with httpx.AsyncClient(base_url=url, timeout=2 * PATIENCE_S) as client:

        async def ask(number: int, schema: dict) -> tuple[dict, httpx.Response]:
            form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
            body = {"prompt": "JSON:", "response_format": form, "seed": number, "temperature": 1, "max_tokens": MOST}
            if number % 4:
                body["logit_bias"] = no_blanks
            async with room:
                return schema, await client.post("/v1/completions", json=body)

        return await asyncio.gather(*(ask(number, schema) for number, schema in enumerate(schemas)))


def outcome(schema: dict, response: httpx.Response) -> str:
    """What became of it; what is wrong with that, if anything is."""
    if response.status_code == 400:
        error = response.json()["error"]
        named = error["param"].startswith("response_format") and len(error["message"]) < 400
        return "refused" if named else f"not named: {error}"
    if response.status_code != 200:
        return f"broken: {response.text}"
    # Importing it takes seconds, also in runs that leave this module out.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    [choice] = response.json()["choices"]
    if choice["finish_reason"] == "length":
        return "cut"
    kind = validator_for(schema, default=Draft202012Validator)
    checked = kind(schema, format_checker=kind.FORMAT_CHECKER)
    errors = [error.message for error in checked.iter_errors(json.loads(choice["text"]))]
    return f"wrong: {json.dumps(schema)[:300]} {choice['text']} {errors}" if errors else "completed"


async def test_every_answer_that_ends_satisfies_its_schema_and_every_refusal_names_it(thinker, no_blanks):
    answers = await outcomes(thinker.url, [*TAKEN, *REFUSED, *DRAWN], no_blanks)
    told = [outcome(*answer) for answer in answers]
    print(Counter(told))
    assert set(told) <= {"completed", "cut", "refused"}, [item for item in told if len(item) > 9]
    assert set(told[len(TAKEN) : len(TAKEN) + len(REFUSED)]) == {"refused"}
    taken = Counter(told[: len(TAKEN)] + told[len(TAKEN) + len(REFUSED) :])
    assert taken["refused"] < 10
    assert taken["completed"] > 150
