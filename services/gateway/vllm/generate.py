"""``POST /inference/v1/generate``: token ids in, token ids out."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import orjson
from fastapi import Response
from pydantic import Field, PlainValidator

from services.common.errors import InvalidRequest, UnsupportedParameter
from services.common.json_scan import Bulk
from services.gateway.engine.active_request import ActiveSample
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.answer import Answer
from services.gateway.openai.body import Body, Elsewhere, optional
from services.gateway.openai.compiler import RequestCompiler
from services.gateway.openai.fields import ModelName, token_ids
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.logprobs import LOWEST
from services.gateway.openai.parse import ignored_header, parse_large, validate
from services.gateway.openai.router import Router
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.shapes import CompletionShape
from services.gateway.openai.transcript import Piece, TokenEntry

# vLLM's defaults, which are not those of the model's generation_config.json.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Parameters of vLLM's SamplingParams about texts, of which the response has none.
_ABOUT_TEXT = frozenset(
    {"detokenize", "include_stop_str_in_output", "output_kind", "skip_special_tokens", "spaces_between_special_tokens"}
)
# Parameters of completions that are not sampling parameters.
_NO_SAMPLING = frozenset(
    {"add_special_tokens", "best_of", "cache_salt", "echo", "logprobs_in_fingerprint", "metadata", "model", "priority",
     "prompt", "return_token_ids", "store", "stream", "stream_options", "timeout", "user"}
)  # fmt: skip


def _as_ids(value: Any) -> np.ndarray:
    if not isinstance(value, (list, np.ndarray)) or not len(value):
        raise ValueError("expected a list of at least one token id")
    return token_ids(value)


class TokenGenerateBody(Body):
    """``POST /inference/v1/generate``, as vLLM has it."""

    bulks: ClassVar[Mapping[str, Bulk]] = {"token_ids": Bulk()}
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        **{name: Elsewhere(f"sampling_params.{name}") for name in ("max_tokens", "temperature", "top_p", "n", "seed")},
        "content_parts": Elsewhere("", ([],)),
        "features": Elsewhere(),
        "prompt": Elsewhere("token_ids"),
        "stream": Elsewhere("", (False,)),
    }

    model: ModelName = None
    token_ids: Annotated[np.ndarray, PlainValidator(_as_ids, json_schema_input_type=list[int])] = Field(
        description="The prompt."
    )
    sampling_params: dict[str, Any] = Field(
        default_factory=dict,
        description="The sampling parameters of a completion, with vLLM's defaults. Default of max_tokens: the rest of"
        " the context.",
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = optional(
        "Cached prefixes are shared only with requests that have the same salt."
    )
    priority: int | None = optional(
        "0 is normal. Requests with a lower value run first, requests with a higher value last."
    )

    def completion(self) -> CompletionBody:
        """Return the completion with the same meaning.

        Raises ``InvalidRequest``, whose field begins with ``sampling_params``.
        """
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        own = {
            "model": self.model,
            "prompt": self.token_ids,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
        }
        for name in given:
            if name in _NO_SAMPLING:
                raise UnsupportedParameter(
                    f"{name!r} is not a sampling parameter; leave it out", field=f"sampling_params.{name}"
                )
        kept = {name: value for name, value in given.items() if name not in _ABOUT_TEXT}
        set_by_caller = {CompletionBody.other_names.get(name, name) for name in kept}
        missing = {name: value for name, value in _DEFAULTS.items() if name not in set_by_caller}
        return validate(missing | kept | own, CompletionBody)


class TokenShape(CompletionShape):
    """The shape of ``/inference/v1/generate``."""

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        document: dict[str, Any] = {"index": choice.index, "token_ids": piece.token_ids, "logprobs": None}
        if self._token_text is not None:
            document["logprobs"] = {"content": [_scored(entry) for entry in piece.entries]}
        document["finish_reason"] = choice.outcome.reason
        document["weights"] = [{"version": version, "tokens": tokens} for version, tokens in choice.outcome.weights]
        document["routed_experts"] = piece.routed_experts
        self._prompt_logprobs = piece.prompt_logprobs
        return orjson.dumps(document)

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        document: dict[str, Any] = {
            "request_id": self.request_id,
            "choices": [orjson.Fragment(text) for text in written],
        }
        document |= {"prompt_logprobs": self._prompt_logprobs, "kv_transfer_params": None}
        return orjson.dumps(document | {"usage": self._usage(choices)})


def _scored(entry: TokenEntry) -> dict[str, Any]:
    """Return a token with its log-probability. As in vLLM, its text is ``token_id:ID``."""
    tops = () if entry.logprob is None else zip(entry.logprob.top_ids, entry.logprob.top_logprobs, strict=True)
    value = LOWEST if entry.logprob is None else entry.logprob.logprob
    return _named(entry.token_id, value) | {"top_logprobs": [_named(*each) for each in tops]}


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": max(logprob, LOWEST), "bytes": None}


router = Router()


@router.answer("/inference/v1/generate", TokenGenerateBody)
async def generate_tokens(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Continue token ids, and return the token ids of the answer and no text, as vLLM does.

    The flag ``logprobs_mode`` and the parameter of this name choose the distribution of the log-probabilities.
    """
    body = await parse_large(gateway.text, posted, TokenGenerateBody)
    try:
        return await _generate(gateway, body, posted.bytes, caller)
    except InvalidRequest as error:
        if error.field == "prompt":
            error.field = "token_ids"
        elif error.field and error.field not in type(body).model_fields and "." not in error.field:
            error.field = f"sampling_params.{error.field}"
        raise


async def _generate(gateway: Gateway, body: TokenGenerateBody, size: int, caller: Caller) -> Response:
    completion = await gateway.text.worked(size, body.completion)
    compiler = await RequestCompiler.of(gateway, completion, 1)
    draft = await compiler.draft(completion, caller, default_tokens=None)
    seed = caller.retry_seed if completion.seed is None else completion.seed
    requests = compiler.prompt_requests(draft, [body.token_ids], caller.request_id, field="prompt", seed=seed)
    token_text = None if completion.logprobs is None else gateway.text.token_text
    shape = TokenShape(caller.request_id, compiler.facts, token_text)
    headers = ignored_header(body, [f"sampling_params.{name}" for name in completion.ignored])
    return await Answer(gateway, requests, shape, headers, caller).respond(stream=False)
