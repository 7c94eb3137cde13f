"""The endpoint ``/generate``."""

import re
from dataclasses import replace

from fastapi import Response

from services.common.errors import InvalidRequest, TokaError
from services.gateway.engine.request import PromptRequest
from services.gateway.http.request import Caller, Posted
from services.gateway.openai.answer import Answer
from services.gateway.openai.compiler import RequestCompiler
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import Router
from services.gateway.sglang.body import COMPLETION_NAMES, GenerateBody
from services.gateway.sglang.shape import GenerateShape, Wanted

# Parameters of completions, as they appear in errors, and their names in this endpoint.
_NAMES = {ours: f"sampling_params.{theirs}" for theirs, ours in COMPLETION_NAMES.items()} | {
    "logprobs": "top_logprobs_num",
    "logprobs_mode": "return_logprob",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
    "routed_experts_prompt_start": "routed_experts_start_len",
}
_NAMES |= {name: f"sampling_params.{name}" for name in ("logit_bias", "n", "stop_token_ids")}
_WITH_UNDERSCORE, _PLAIN = (
    "|".join(sorted((name for name in _NAMES if ("_" in name) is wanted), key=len, reverse=True))
    for wanted in (True, False)
)
# In a message. A name without an underscore may be a word, unless a value or a colon follows.
_NAME = re.compile(rf"(?<![\w.])(?:(?:{_WITH_UNDERSCORE})\b|(?:{_PLAIN})(?==|'?:))")

router = Router()


@router.answer("/generate", GenerateBody, streams=True)
async def generate(gateway: Gateway, posted: Posted, caller: Caller) -> Response:
    """Continue one prompt or several, as SGLang's own endpoint does.

    The defaults of ``sampling_params`` are SGLang's. Log-probabilities are those of the distribution that tokens were
    drawn from.
    """
    body = await parse_large(gateway.text, posted, GenerateBody)
    try:
        return await _generate(gateway, body, posted.bytes, caller)
    except InvalidRequest as error:
        raise _in_own_words(error, body) from None


async def _generate(gateway: Gateway, body: GenerateBody, size: int, caller: Caller) -> Response:
    completion = await gateway.text.worked(size, body.completion)
    compiler = await RequestCompiler.of(gateway, completion, len(body.prompts))
    # Used if the client set no number: 128, or None for null.
    default_tokens = body.sampling_params.max_new_tokens
    draft = await compiler.draft(completion, caller, default_tokens=default_tokens)
    # Completions refuse this with stop strings, which are removed by their bytes. Here, the whole text is compared.
    shows_specials = body.sampling_params.skip_special_tokens is False
    draft = draft._replace(settings=replace(draft.settings, special_tokens=shows_specials))
    prompts = body.input_ids or await compiler.encode(draft, body.text or [], add_special_tokens=True)
    seed = caller.retry_seed if completion.seed is None else completion.seed
    name = body.rid if isinstance(body.rid, str) else caller.request_id
    requests = await gateway.text.in_thread(
        lambda: _named(compiler.prompt_requests(draft, prompts, name, field="prompt", seed=seed), body.rid)
    )
    vocabulary = gateway.text.vocabulary.with_specials if shows_specials else gateway.text.vocabulary
    shape = GenerateShape(name, compiler.facts, gateway.text.token_text, vocabulary, _wanted(body))
    return await Answer(gateway, requests, shape, ignored_header(body), caller).respond(stream=body.stream)


def _named(requests: list[PromptRequest], ids: str | list[str] | None) -> list[PromptRequest]:
    """Return ``requests`` with the caller's ids, if it gave a list of them."""
    if not isinstance(ids, list):
        return requests
    return [replace(request, request_id=each) for request, each in zip(requests, ids, strict=True)]


def _wanted(body: GenerateBody) -> Wanted:
    return Wanted(
        in_list=body.is_list,
        logprobs=body.return_logprob,
        prompt_logprobs_from=body.logprob_start_len if body.scores_prompt else None,
        top_logprobs=body.top_logprobs_num,
        token_texts=body.return_text_in_logprobs,
        trims_stops=not body.sampling_params.no_stop_trim,
        routed_experts_from=body.routed_experts_start_len,
    )


def _in_own_words(error: InvalidRequest, body: GenerateBody) -> TokaError:
    """Return ``error`` of the completion with the names of this endpoint's parameters."""
    names = _NAMES | {"prompt": "text" if body.text is not None else "input_ids"}
    error.field = names.get(error.field, error.field)
    error.message = _NAME.sub(lambda found: names[found[0]], error.message)
    return error
