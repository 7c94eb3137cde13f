"""Grammars for tests, what follows them, and a tokenizer of so few tokens that any model has them."""

import json
import re
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.common.text.vocabulary import read_vocabulary

WORDS = r"start: /[a-d]{2,4}(-[0-9]{1,3}){0,2}/"
LISTS = """
start: list
list: "[" [item ("," item)*] "]"
item: list | /[xyz]{1,2}/
"""
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 22, 333]}, "open": {"type": "boolean"}, "tag": {"enum": ["ab", "cd"]}},
    "required": ["size", "open", "tag"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
OBJECTS = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
BROKEN = "start: (("


def follows(grammar: str, text: str) -> bool:
    """Whether ``text``, whole, matches one of those above; judged without the library that makes masks."""
    if grammar == WORDS:
        return re.fullmatch(r"[a-d]{2,4}(-[0-9]{1,3}){0,2}", text) is not None
    if grammar == LISTS:
        while (shorter := re.sub(r"\[([xyz]{1,2}(,[xyz]{1,2})*)?\]", "x", text)) != text:
            if shorter == "x":
                return True
            text = shorter
        return False
    assert grammar == OBJECTS
    found = json.loads(text)
    kinds = {"size": (1, 22, 333), "open": (True, False), "tag": ("ab", "cd")}
    return list(found) == list(kinds) and all(found[name] in kinds[name] for name in kinds)


def answer(tokenizer: Tokenizer, tokens: list[int], ends: set[int]) -> str | None:
    """The text before the first of ``ends``; None where there is none."""
    count = next((index for index, token in enumerate(tokens) if token in ends), None)
    return None if count is None else tokenizer.vocabulary.text_bytes(tokens[:count]).decode()


@cache
def ascii_tokenizer() -> Tokenizer:
    """96 tokens: 0 ends a sequence, the others are the printable characters of ASCII."""
    alphabet = ["<end>", "Ġ", *map(chr, range(33, 127))]
    backend = tokenizers.Tokenizer(models.BPE({piece: token for token, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, read_vocabulary(backend), None, "ascii")


@cache
def ascii_grammars() -> Grammars:
    return Grammars(ascii_tokenizer(), [0])
