"""The text of a grammar is made once for all requests that have it."""

import json

import pytest

from services.common.errors import InvalidRequest
from services.scheduler.grammar.message import cache_long_text, grammar_text
from tokasaurus.scheduler.v1 import generate_pb2 as g

SCHEMA = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}})


@pytest.mark.parametrize(
    "grammar", [g.Grammar(json_schema=SCHEMA), g.Grammar(choices=g.Choices(texts=["a", "b"])), g.Grammar(regex="a+b")]
)
def test_requests_with_the_same_grammar_have_one_text(grammar):
    copies = [g.Grammar.FromString(grammar.SerializeToString()) for _ in range(3)]
    assert len({id(grammar_text(copy)) for copy in copies}) == 1


def test_different_grammars_have_different_texts():
    assert grammar_text(g.Grammar(choices=g.Choices(texts=["a"]))) != grammar_text(g.Grammar(regex="a"))


def test_what_is_wrong_with_one_is_found_once(monkeypatch):
    read = []
    loads = json.loads
    monkeypatch.setattr("services.scheduler.grammar.message.json.loads", lambda text: read.append(text) or loads(text))
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="must be a JSON object") as caught:
            grammar_text(g.Grammar(json_schema='["what is wrong with one is found once"]'))
        assert caught.value.field == "sampling.grammar"
    assert len(read) == 1


async def test_a_long_text_is_made_by_a_thread(monkeypatch):
    threads = []
    monkeypatch.setattr(
        "services.scheduler.grammar.message.asyncio.to_thread", lambda *call: threads.append(call) or _done()
    )
    for length, times in ((100, 0), (100_000, 1)):
        await cache_long_text(g.Sampling(grammar=g.Grammar(regex="a" * length)))
        assert len(threads) == times
    await cache_long_text(g.Sampling())


async def _done() -> None: ...
