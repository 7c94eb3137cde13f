"""The bytes that each token adds to the text.

The text of a token sequence is the concatenation of its tokens' bytes, decoded as UTF-8. The detokenizer and the stop
automaton both use these bytes, so they agree on every character, including characters that span tokens.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
import tokenizers

from services.common.errors import InvalidRequest
from services.common.model.json_object import MOST_VOCABULARY

_SPACE_MARK = "▁"  # SentencePiece writes a space as this
# Some tokenizers declare these special, but an answer cannot be parsed without them.
_MARKS = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})
# Marks of the messages in an answer of gpt-oss. They apply to a tokenizer that has the first of them.
_CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


TokenIds: TypeAlias = Sequence[int] | np.ndarray  # array: uint32


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Immutable table of a tokenizer's tokens, shared by all requests of a process."""

    token_bytes: list[bytes]  # index = token id; empty for special tokens and for ids without a token
    special_ids: frozenset[int]
    special_names: dict[int, str] = field(default_factory=dict)  # text of each special token

    @property
    def size(self) -> int:
        """The number of token ids, including ids of the model that the tokenizer lacks."""
        return len(self.token_bytes)

    @cached_property
    def with_specials(self) -> "Vocabulary":
        """The vocabulary in which special tokens have their names as text."""
        token_bytes = self.token_bytes.copy()
        for token, name in self.special_names.items():
            token_bytes[token] = name.encode()
        return replace(self, token_bytes=token_bytes)

    def text_bytes(self, token_ids: TokenIds) -> bytes:
        """Return the bytes of a sequence of ids. Ids beyond the vocabulary add nothing."""
        return b"".join([self.token_bytes[token] for token in token_ids if token < len(self.token_bytes)])


def read_vocabulary(tokenizer: tokenizers.Tokenizer, model_vocab_size: int = 0) -> Vocabulary:
    """Return the vocabulary of ``tokenizer``, padded to the model's size.

    Raises ``InvalidRequest`` for a decoder whose text is not the concatenation of its tokens' bytes.
    """
    spec = json.loads(tokenizer.to_str())
    to_bytes = _piece_decoder(spec["decoder"])
    pieces = tokenizer.get_vocab(with_added_tokens=True)
    added = {entry["id"]: entry for entry in spec["added_tokens"]}
    size = max(model_vocab_size, max(pieces.values(), default=-1) + 1)
    if size > MOST_VOCABULARY:
        raise InvalidRequest(
            f"the tokenizer has the token id {size - 1:,}; at most {MOST_VOCABULARY:,} ids are supported: fetch"
            " tokenizer.json again, or name another tokenizer=",
            field="tokenizer",
        )
    marks = _MARKS.union(_CHANNEL_MARKS if _CHANNEL_MARKS[0] in pieces else ())
    token_bytes = [b""] * size
    for piece, token in pieces.items():
        entry = added.get(token)
        if entry is None:
            token_bytes[token] = to_bytes(piece)
        elif not entry["special"] or entry["content"] in marks:
            token_bytes[token] = to_bytes(piece) if to_bytes is _sentencepiece else piece.encode()
    names = {token: entry["content"] for token, entry in added.items() if entry["special"]}
    return Vocabulary(token_bytes, frozenset(names), names)


def _piece_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function piece -> bytes that is equivalent to the tokenizer's decoder inside a text."""
    kinds = {step["type"] for step in _steps(decoder)}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece
    raise InvalidRequest(
        f"the tokenizer's decoder {sorted(kinds) or 'none'} is not supported: expected a byte-level BPE or a"
        " SentencePiece-style tokenizer",
        field="tokenizer",
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _sentencepiece(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(_SPACE_MARK, " ").encode()


def _byte_level(piece: str) -> bytes:
    alphabet = _byte_level_alphabet()
    try:
        return bytes(alphabet[character] for character in piece)
    except KeyError:  # a token outside the byte alphabet represents itself
        return piece.encode()


def byte_level_text(token: bytes) -> str:
    """Return ``token`` as written by a byte-level BPE, one character for each byte."""
    characters = {byte: character for character, byte in _byte_level_alphabet().items()}
    return "".join([characters[byte] for byte in token])


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Return the mapping character -> byte of GPT-2's byte-level BPE.

    Printable bytes represent themselves, the others are mapped to characters from 256.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
