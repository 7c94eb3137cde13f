"""Plans and results as the worker's messages."""

import numpy as np

from services.common.packed import fill, read_fixed32, read_float
from services.common.plan.top_logprobs import TopLogprobs
from services.scheduler.core.plan import NO_FLOATS, NO_SLOTS, Failure, Plan, Result, Scored, SlotAdmissions
from services.scheduler.core.request import SamplingSettings, WorkerShape
from tokasaurus.worker.v1 import plan_pb2, worker_pb2


def encode_plan(plan: Plan) -> plan_pb2.StepPlan:
    """Arrays go in as packed bytes: no Python object for each row."""
    message = plan_pb2.StepPlan(step=plan.step)
    message.release_slots.extend(plan.released)
    for admissions in plan.admissions:
        _encode_admissions(message, admissions)
    fill(message, "append_slots", plan.append_slots)
    fill(message, "append_pages", plan.append_pages)
    message.copy_source_pages.extend(source for source, _ in plan.copies)
    message.copy_target_pages.extend(target for _, target in plan.copies)
    if plan.slots is not None:
        message.batch.SetInParent()
        fill(message.batch, "slots", plan.slots)
        fill(message.batch, "token_counts", NO_SLOTS if plan.counts is None else plan.counts)
        fill(message, "micro_batch_rows", NO_SLOTS if plan.parts is None else plan.parts)
    if plan.group_starts is not None:
        message.hydragen.SetInParent()
        fill(message.hydragen, "starts", plan.group_starts)
        fill(message.hydragen, "counts", plan.group_counts)
        fill(message.hydragen, "prefix_pages", plan.group_pages)
    return message


def _encode_admissions(message: plan_pb2.StepPlan, admissions: SlotAdmissions) -> None:
    """What the sequences have in common is encoded once."""
    common = plan_pb2.Admission(cached_tokens=admissions.cached_tokens)
    fill(common, "token_ids", admissions.token_ids)
    if admissions.prompt_tokens < len(admissions.token_ids):  # 0 = all
        common.prompt_tokens = admissions.prompt_tokens
    wanted = admissions.sampling
    common.sampling.MergeFromString(wanted.wire or encode_sampling(wanted))
    common.sampling.grammar = wanted.grammar
    common.traceparent = admissions.traceparent
    encoded = common.SerializeToString()
    rows = zip(admissions.slots.tolist(), admissions.pages, admissions.sample_indices, strict=True)
    for slot, pages, sample_index in rows:
        admission = message.admissions.add()
        admission.MergeFromString(encoded)
        admission.slot, admission.sampling.sample_index = slot, sample_index
        fill(admission, "pages", pages)


def encode_sampling(wanted: SamplingSettings) -> bytes:
    """All but the grammar, of which many requests share one text. Done when a request is read, where what goes wrong is
    that request's: nothing of it can fail when a plan is encoded."""
    sampling = plan_pb2.SamplingSettings()
    sampling.temperature, sampling.top_p, sampling.top_k = wanted.temperature, wanted.top_p, wanted.top_k
    sampling.min_p, sampling.seed = wanted.min_p, wanted.seed
    sampling.logprobs, sampling.top_logprobs = wanted.logprobs, wanted.top_logprobs
    fill(sampling, "logit_bias_token_ids", wanted.logit_bias_token_ids)
    fill(sampling, "logit_bias_values", wanted.logit_bias_values)
    sampling.repetition_penalty, sampling.frequency_penalty = wanted.repetition_penalty, wanted.frequency_penalty
    sampling.presence_penalty = wanted.presence_penalty
    if wanted.prompt_logprobs is not None:
        sampling.prompt_logprobs = wanted.prompt_logprobs
        sampling.prompt_logprobs_start = wanted.prompt_logprobs_start
    sampling.processed_logprobs = wanted.processed_logprobs
    if wanted.thinking is not None:
        tokens, end, begin = wanted.thinking
        sampling.thinking.CopyFrom(plan_pb2.ThinkingBudget(tokens=tokens, end_token_id=end, begin_token_id=begin))
    return sampling.SerializeToString()


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
