"""Log-probabilities as arrays in base64, in ``system_fingerprint``, as in the original Tokasaurus.

A number takes 5.3 bytes. OpenAI's form has an object with text and bytes for each token.
"""

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import TokenLogprob


class Packed(NamedTuple):
    """The generated tokens of one choice, a stop token included. Arrays are little-endian, in base64."""

    token_ids: list[int]
    chosen: str  # float32 [tokens]
    # int32 [tokens, top], the most likely first, -1 if fewer tokens can be drawn. None if the request asks for none.
    top_ids: str | None
    top_logprobs: str | None  # float32 [tokens, top], of top_ids


def pack(token_ids: TokenIds, logprobs: Sequence[TokenLogprob], top: int) -> Packed:
    """Return ``token_ids`` with their ``logprobs``, each with its ``top`` most likely tokens."""
    return Packed(
        list(map(int, token_ids)),
        _base64([entry.logprob for entry in logprobs], "<f4"),
        _base64([_filled(entry.top_ids, top, -1) for entry in logprobs], "<i4") if top else None,
        _base64([_filled(entry.top_logprobs, top, -math.inf) for entry in logprobs], "<f4") if top else None,
    )


def fingerprint(choices: Sequence[Packed]) -> str:
    """Return ``system_fingerprint`` of an answer: JSON of lists with one entry for each choice."""
    top = any(choice.top_ids is not None for choice in choices)
    packed = {
        "completion_ids": [choice.token_ids for choice in choices],
        "packed_chosen_logprobs": [choice.chosen for choice in choices],
        "packed_topk_indices": [choice.top_ids for choice in choices] if top else None,
        "packed_topk_logprobs": [choice.top_logprobs for choice in choices] if top else None,
    }
    return orjson.dumps(packed).decode()


def _filled(values: list[Any], count: int, filler: float) -> list[Any]:
    return values[:count] + [filler] * (count - len(values))


def _base64(rows: list[float] | list[list[int]] | list[list[float]], dtype: str) -> str:
    return base64.b64encode(np.array(rows, dtype).tobytes()).decode()
