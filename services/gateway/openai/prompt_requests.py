"""Makes the prompt requests of a body, which are what schedulers get."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from services.common.errors import InvalidValue
from services.common.request_bounds import MAX_BIAS_COPIES
from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.text import check_token_ids

_U64 = 2**64


def make_prompt_requests(
    request_id: str,
    prompts: Sequence[TokenIds],
    settings: Settings,
    facts: ModelFacts,
    *,
    field: str,
    max_tokens: int | None,
    seed: int | None,
) -> list[PromptRequest]:
    """Return a request for each prompt. Raises InvalidRequest.

    ``max_tokens``: maximum number of tokens of each answer. None: the rest of the context. 0: only score the prompt.
    """
    _check_bias_copies(len(prompts), settings)
    requests = []
    seen: Counter[bytes] = Counter()
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt, np.uint32)
        check_token_ids(ids, facts.vocab_size, facts.max_context_tokens, field)
        _check_prompt_logprobs_start(settings.prompt_logprobs_start, len(ids))
        repeat = 0
        if seed is not None and len(prompts) > 1:
            key = ids.tobytes()
            repeat, seen[key] = seen[key], seen[key] + 1
        room = facts.max_context_tokens - len(ids)
        _check_min_tokens(settings.min_tokens, max_tokens, room)
        requests.append(
            PromptRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                model=facts.id,
                prompt_ids=ids,
                max_tokens=room if max_tokens is None else min(max(max_tokens, 1), room),
                seed=None if seed is None else seed_of(seed, repeat),
                settings=settings,
            )
        )
    return requests


def seed_of(seed: int, repeat: int) -> int:
    """Return the seed of a prompt's occurrence number ``repeat`` in one request.

    The first occurrence has the caller's seed, so that a prompt gets the same answer alone and in a list. Each later
    occurrence has another seed.
    """
    mixed = (seed + repeat * 0x9E3779B97F4A7C15) % _U64
    if repeat:
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _U64
        mixed ^= mixed >> 31
    return mixed


def _check_bias_copies(prompts: int, settings: Settings) -> None:
    """Raise InvalidRequest if all samples together have too many bias entries. Each sample has a copy of the bias."""
    choices, entries = prompts * settings.n, len(settings.sampling.logit_bias_token_ids)
    if choices * entries > MAX_BIAS_COPIES:
        raise InvalidValue.at(
            "logit_bias",
            f"{entries} tokens for each of {choices} choices are more than {MAX_BIAS_COPIES}; send several"
            " requests, or bias fewer tokens",
        )


def _check_prompt_logprobs_start(start: int, prompt_tokens: int) -> None:
    if start >= prompt_tokens:
        raise InvalidValue(
            f"prompt_logprobs_start={start}: the prompt has {prompt_tokens} tokens; expected 0 to {prompt_tokens - 1}",
            field="prompt_logprobs_start",
        )


def _check_min_tokens(least: int, max_tokens: int | None, room: int) -> None:
    if max_tokens is not None and least > max_tokens:
        limit = f"max_tokens={max_tokens}"
    elif least > room:
        limit = f"the {room} tokens that the context has left behind the prompt"
    else:
        return
    raise InvalidValue(f"min_tokens={least} is more than {limit}; ask for less", field="min_tokens")
