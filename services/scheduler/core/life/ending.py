"""The reason for the end of a sample, and the message about it."""

from typing import NamedTuple

from services.common.errors import TokaError
from services.scheduler.core.request import Finish, FinishReason, Sample, WeightsSpan


class Ending(NamedTuple):
    """The end of a sample, before it is carried out."""

    sample: Sample
    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: tuple[int, int] | None = None
    error: TokaError | None = None


def spans_of(sample: Sample, known: int, version: str) -> tuple[WeightsSpan, ...]:
    """Return the spans of a sample of ``known`` tokens, the last ones of which weights of ``version`` generated."""
    more = known - len(sample.request.tokens) - sum(span.tokens for span in sample.spans)
    return (*sample.spans, WeightsSpan(version, more)) if more > 0 else sample.spans


def finish_of(ending: Ending, version: str) -> Finish:
    """Return the message for the client about ``ending``. ``sample.known`` must be up to date.

    ``version`` is that of the present weights.
    """
    sample, request = ending.sample, ending.sample.request
    started, first, last = sample.first_plan_ns, sample.first_token_ns, sample.last_token_ns
    return Finish(
        handle=sample.handle,
        reason=ending.reason,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=sample.known - request.prompt_tokens,
        cached_prompt_tokens=max(0, sample.cached_tokens),
        queued_ns=max(0, started - sample.accepted_ns),
        prefill_ns=max(0, first - started) if first else 0,
        decode_ns=last - first,
        preemptions=sample.preemptions,
        stop_token_id=ending.stop_token_id,
        stop_string=ending.stop_string,
        error=ending.error,
        spans=spans_of(sample, sample.known, version) if version or sample.spans else (),
    )
