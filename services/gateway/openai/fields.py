"""Types of fields that several request bodies share, with the checks that pydantic has no constraint for."""

import contextlib
from array import array
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from services.common.request_bounds import MAX_BIASES
from services.common.sampling import PARAMETERS
from services.gateway.openai.json_value import shown

MAX_STOPS = 16
MAX_STOP_BYTES = 4096
# Far more prompts than a client sends. It limits the time to validate one body.
MAX_PROMPTS = 65_536
MAX_METADATA = 16
_MAX_TOKEN_ID = 2**32 - 1
_MAX_BIAS = 100


def in_range(name: str) -> Any:
    """Return the constraint of the sampling parameter ``name`` for pydantic."""
    _, least, most, exclusive, _ = PARAMETERS[name]
    least = round(least, 6)  # as in JSON, where it is no 32-bit float
    return Field(gt=least, le=most) if exclusive else Field(ge=least, le=most)


def as_prompts(value: Any) -> Any:
    """Return a prompt in any of OpenAI's four forms as a list of prompts. Token ids become arrays of uint32."""
    if isinstance(value, (str, np.ndarray)):  # an array holds the token ids of a large body
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value:
        raise ValueError("expected at least one prompt, not an empty list")
    if all(isinstance(item, (str, np.ndarray)) for item in value) and len({type(item) for item in value}) == 1:
        return value
    prompts = value if all(isinstance(item, (list, np.ndarray)) for item in value) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {number} has no tokens; give at least one")
    return [token_ids(prompt) for prompt in prompts]


def token_ids(prompt: list[Any] | np.ndarray) -> np.ndarray:
    """Return ``prompt`` as uint32 [tokens]. Raises ValueError for an item that is not a token id."""
    if isinstance(prompt, np.ndarray):
        return prompt
    with contextlib.suppress(TypeError, OverflowError):
        ids = np.frombuffer(array("I", prompt), np.uint32)
        if ids.min() > 1:  # array() also accepts false and true, as 0 and 1
            return ids
    for item in prompt:
        if type(item) is not int or not 0 <= item <= _MAX_TOKEN_ID:
            raise ValueError(
                "expected a string, a list of strings, a list of token ids, or a list of lists of token ids;"
                f" found {shown(item, 40)} among them"
            )
    return np.array(prompt, np.uint32)


def _as_stops(value: Any) -> tuple[str, ...]:
    """Return ``stop`` as a tuple of stop strings. Raises ValueError."""
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
    if any(len(stop.encode()) > MAX_STOP_BYTES for stop in stops):
        raise ValueError(f"a stop string has at most {MAX_STOP_BYTES} bytes")
    if "" in stops:
        raise ValueError("a stop string must not be empty")
    return tuple(stops)


def at_most(most: int, value: Any) -> Any:
    """Return ``value``. Raises ValueError for an object with more than ``most`` members, before they are validated."""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"expected at most {most} items (got an object of {len(value)})")
    return value


def _first_wrong_bias(value: Any) -> Any:
    """Return ``value``, or only its first wrong member. Pydantic would collect an error for each wrong member."""
    if not isinstance(value, dict):
        return value
    for token, bias in value.items():
        if type(bias) not in (int, float) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            return {token: bias}
    return value


def _not_zero(tokens: int) -> int:
    """Return ``tokens``. Raises ValueError for 0."""
    if tokens == 0:
        raise ValueError("expected at least 1, or -1 for as many as there is room for")
    return tokens


Prompts = Annotated[
    list[str] | list[np.ndarray],
    PlainValidator(as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stops = Annotated[tuple[str, ...], PlainValidator(_as_stops, json_schema_input_type=str | list[str] | None)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(partial(at_most, MAX_METADATA)),
]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(_first_wrong_bias),
    BeforeValidator(partial(at_most, MAX_BIASES)),
]
ModelName = Annotated[
    str | None,
    Field(
        description="Name of the served model. Default: the served model. strict_model_names= decides on other names."
    ),
]
Timeout = Annotated[float, Field(gt=0, le=86_400)]
KeptTokens = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
