"""OpenAI's ``usage``: the tokens and the time of a request, from the outcomes of its choices."""

from collections.abc import Sequence
from typing import Any

from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.codec import SampleEnding


def usage_of(choices: Sequence[ActiveSample]) -> dict[str, Any]:
    """Return the usage of a request, whose choices have ended. A prompt counts once, not for each of its samples."""
    prompts: dict[int, tuple[int, int]] = {}  # prompt index -> (tokens, cached tokens)
    completion = 0
    for choice in choices:
        ending = choice.outcome
        completion += ending.completion_tokens
        # Later samples share the pages of the first, so the fewest cached tokens are those of the sample that computed
        # the prompt.
        _, cached = prompts.get(choice.prompt_index, (0, ending.cached_tokens))
        prompts[choice.prompt_index] = (ending.prompt_tokens, min(cached, ending.cached_tokens))
    prompt = sum(tokens for tokens, _ in prompts.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts.values())},
        "timing": _timing([choice.outcome for choice in choices]),
    }


def _timing(endings: Sequence[SampleEnding]) -> dict[str, int]:
    """Return the longest time of any choice for each phase, in milliseconds. This is an extension of OpenAI's usage.

    Times are whole numbers, because clients add up the members of ``usage``.
    """
    return {
        "queue_ms": round(1000 * max((ending.queued_s for ending in endings), default=0)),
        "prefill_ms": round(1000 * max((ending.prefill_s for ending in endings), default=0)),
        "decode_ms": round(1000 * max((ending.decode_s for ending in endings), default=0)),
    }
