"""Plans and results as the worker's messages."""

import numpy as np

from services.common.packed import read_fixed32, read_float
from services.common.plan.top_logprobs import TopLogprobs
from services.scheduler.core.plan import NO_FLOATS, Failure, Result, Scored
from services.scheduler.core.request import WorkerShape
from tokasaurus.worker.v1 import plan_pb2, worker_pb2


def decode_result(message: plan_pb2.StepResult) -> Result:
    return Result(
        step=message.step,
        slots=read_fixed32(message.slots).astype(np.int64),
        tokens=read_fixed32(message.token_ids).astype(np.int64),
        logprobs=read_float(message.logprobs) if message.logprobs else NO_FLOATS,
        top=_decode_top(message),
        device_ns=message.timing.device_ns,
        idle_ns=message.timing.idle_ns,
        failures=tuple(
            Failure(failure.slot, failure.message, failure.cause == plan_pb2.FAILURE_CAUSE_FORBIDDEN_TOKENS)
            for failure in message.failures
        ),
        scored=tuple((scores.slot, _decode_scores(scores)) for scores in message.prompts),
    )


def _decode_top(message: plan_pb2.StepResult) -> TopLogprobs | None:
    """Return the lists, or None if there are none. They may not fit each other: the core checks that."""
    if not (message.top_counts or message.top_token_ids or message.top_logprobs):
        return None
    counts = read_fixed32(message.top_counts).astype(np.int64)
    return TopLogprobs(counts, read_fixed32(message.top_token_ids), read_float(message.top_logprobs))


def _decode_scores(message: plan_pb2.PromptScores) -> Scored:
    return Scored(
        message.start,
        read_float(message.logprobs),
        read_fixed32(message.ranks),
        read_fixed32(message.top_token_ids),
        read_float(message.top_logprobs),
    )


def decode_shape(info: worker_pb2.WorkerInfo, max_context_tokens: int) -> WorkerShape:
    """The worker's sizes; the context is what both the model and the worker allow."""
    return WorkerShape(
        page_size=info.page_size,
        page_count=info.page_count,
        max_slots=info.max_slots,
        max_tokens_per_step=info.max_tokens_per_step,
        max_context_tokens=min(info.max_context_tokens, max_context_tokens),
        vocab_size=info.vocab_size,
        max_top_logprobs=info.max_top_logprobs,
        prompt_logprobs=info.prompt_logprobs,
        grammars=info.grammars,
        hydragen=info.hydragen,
        processed_logprobs=info.processed_logprobs,
        thinking_budgets=info.thinking_budgets,
    )
