"""Log-probabilities as base64 of arrays, in ``system_fingerprint``: what the original Tokasaurus has there.

OpenAI spends an object, with text and bytes, on each token; here a number of 4 bytes takes 16/3.
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
    """One choice: every token that was generated, a stop token included. Arrays are little-endian, in base64."""

    token_ids: list[int]
    chosen: str  # float32 [tokens]
    # int32 [tokens, top], most likely first; -1 where fewer tokens can be drawn. None: not asked for.
    top_ids: str | None
    top_logprobs: str | None  # float32, beside top_ids


def pack(token_ids: TokenIds, logprobs: Sequence[TokenLogprob], top: int) -> Packed:
    """``logprobs`` beside ``token_ids``, with ``top`` of the most likely tokens each."""
    return Packed(
        list(map(int, token_ids)),
        _base64([entry.logprob for entry in logprobs], "<f4"),
        _base64([_filled(entry.top_ids, top, -1) for entry in logprobs], "<i4") if top else None,
        _base64([_filled(entry.top_logprobs, top, -math.inf) for entry in logprobs], "<f4") if top else None,
    )


def fingerprint(choices: Sequence[Packed]) -> str:
    """``system_fingerprint`` of an answer: JSON, lists with one entry for each choice."""
    top = any(choice.top_ids is not None for choice in choices)
    told = {
        "completion_ids": [choice.token_ids for choice in choices],
        "packed_chosen_logprobs": [choice.chosen for choice in choices],
        "packed_topk_indices": [choice.top_ids for choice in choices] if top else None,
        "packed_topk_logprobs": [choice.top_logprobs for choice in choices] if top else None,
    }
    return orjson.dumps(told).decode()


def _filled(values: list[Any], count: int, filler: float) -> list[Any]:
    return values[:count] + [filler] * (count - len(values))


def _base64(rows: list[float] | list[list[int]] | list[list[float]], dtype: str) -> str:
    return base64.b64encode(np.array(rows, dtype).tobytes()).decode()
