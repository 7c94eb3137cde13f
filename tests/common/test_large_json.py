"""Large JSON in pieces: the same values as in one call, and bounds on what is made."""

import json
import random
from typing import Any

import numpy as np
import orjson
import pytest

from services.common.errors import InvalidRequest
from services.common.json_scan import MAX_VALUES, Bulk, TooManyValues
from services.common.large_json import MAX_CHARACTERS, PIECE_BYTES, load

_SCALARS = (1, -2.5, True, None, "", "a,b", '"[{', "\\", '\\\\"', " ,", "😀\u2028" * 30, "x" * 200, "é🙂\n" * 7)
IDS = {"prompt": Bulk(), "logit_bias": Bulk(2**18)}


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.random()
    if depth > 6 or kind < 0.3:
        return draw.choice(_SCALARS)
    if kind < 0.65:
        return [value(draw, depth + 1) for _ in range(draw.randrange(6))]
    names = [draw.choice(("a", "b", '\\"', ",", "é")) + str(draw.randrange(9)) for _ in range(draw.randrange(6))]
    return {name: value(draw, depth + 1) for name in names}


def broken(draw: random.Random, raw: bytes) -> bytes:
    text = bytearray(raw)
    for _ in range(draw.randrange(3)):
        text[draw.randrange(len(text))] = draw.choice(b'[]{},:"\\ a1')
    return bytes(text)


def outcome(raw: bytes, piece_bytes: int | None) -> str | None:
    """Return the value as text, or None for a text that is no JSON."""
    try:
        return json.dumps(orjson.loads(raw) if piece_bytes is None else load(raw, piece_bytes=piece_bytes))
    except orjson.JSONDecodeError:
        return None


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 1500), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("piece_bytes", [100, *(pytest.param(size, marks=pytest.mark.slow) for size in (20, 32))])
def test_a_text_has_the_same_value_in_pieces_as_in_one_call(piece_bytes, seeds):
    for seed in seeds:
        draw = random.Random(seed)
        written = json.dumps(value(draw), ensure_ascii=draw.random() < 0.5, indent=draw.choice((None, None, 1)))
        raw = broken(draw, written.encode())
        assert outcome(raw, piece_bytes) == outcome(raw, None), raw


def test_the_last_of_two_members_of_one_name_counts():
    raw = b'{"a": [%b], "b": 1, "a": [%b]}' % (b",".join([b"1"] * 99), b",".join([b"2"] * 99))
    assert load(raw, piece_bytes=32) == {"a": [2] * 99, "b": 1}


@pytest.mark.parametrize("item", [b"[]", b"{}", b"1", b'""', b'{"a":[]}'])
def test_values_are_counted_before_they_are_made(item):
    raw = b'{"x": [%b]}' % b",".join([item] * (MAX_VALUES + 1))
    with pytest.raises(TooManyValues, match="values") as refusal:
        load(raw, IDS)
    assert refusal.value.field == "x"


def test_commas_in_a_text_are_no_values():
    text = ', [{\\"' * MAX_VALUES
    assert load(orjson.dumps({"prompt": text})) == {"prompt": text}


def test_token_ids_are_read_into_arrays():
    ids = [draw % 128_000 for draw in range(0, 10**9, 2003)]
    prompt = load(orjson.dumps({"prompt": ids, "n": 1}), IDS)["prompt"]
    assert (prompt.dtype, prompt.tolist()) == (np.uint32, ids)


def test_lists_of_token_ids_are_read_into_arrays():
    lists = [[number, *range(200), 2**32 - 1] for number in range(1024)] + [[*range(100_000)]]
    prompt = load(orjson.dumps({"prompt": lists}), IDS)["prompt"]
    assert [each.tolist() for each in prompt] == lists


@pytest.mark.parametrize("wrong", [True, -1, 2**32, 1.5, "a", None, {}, []])
def test_what_is_no_token_id_is_handed_to_validation(wrong):
    some = [7] * PIECE_BYTES
    assert load(orjson.dumps({"prompt": [*some, wrong, *some]}), IDS)["prompt"] not in (None, some)
    assert isinstance(load(orjson.dumps({"prompt": [*some, wrong, *some]}), IDS)["prompt"], list)


def test_a_bias_for_each_token_is_no_large_body():
    biases = {str(token): -100 for token in range(2**18)}
    assert load(orjson.dumps({"logit_bias": biases}), IDS)["logit_bias"] == biases
    with pytest.raises(TooManyValues):
        load(orjson.dumps({"logit_bias": {str(token): 1 for token in range(2**18 + 2**17 + 2**16)}}), IDS)


def test_a_text_may_be_as_long_as_the_limit_and_no_longer():
    text = "é🙂" * (MAX_CHARACTERS // 2)
    for escaped in (True, False):
        assert load(json.dumps([text], ensure_ascii=escaped).encode()) == [text]
        with pytest.raises(InvalidRequest, match="characters"):
            load(json.dumps([text + "a" * PIECE_BYTES], ensure_ascii=escaped).encode())


def test_a_long_value_behind_many_brackets_is_refused():
    raw = b"[" * 30 + b'"%b"' % (b"a" * 3_000_000) + b"]" * 30
    with pytest.raises(InvalidRequest, match="flatter"):
        load(raw)
