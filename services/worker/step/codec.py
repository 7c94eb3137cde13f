"""Wire messages to the runner's plain values and back."""

from collections.abc import Sequence

import numpy as np

from services.common.packed import fill, read_fixed32, read_float
from services.common.thinking import ThinkingBudget
from services.worker.step.plan import (
    Admission,
    Batch,
    Failure,
    Groups,
    Plan,
    SamplingSettings,
    StepOutput,
)
from tokasaurus.worker.v1 import plan_pb2

_NONE = np.empty(0, np.int64)
_NO_NUMBERS = Failure("the model's logits are not numbers")
_FORBIDDEN = plan_pb2.FAILURE_CAUSE_FORBIDDEN_TOKENS


def decode_plan(message: plan_pb2.StepPlan) -> Plan:
    """Values are taken over as they are: whether they make sense is for ``runner.checks``."""
    return Plan(
        step=message.step,
        releases=_integers(message.release_slots),
        admissions=tuple(_decode_admission(admission) for admission in message.admissions),
        append_slots=_integers(message.append_slots),
        append_pages=_integers(message.append_pages),
        copy_sources=_integers(message.copy_source_pages),
        copy_targets=_integers(message.copy_target_pages),
        batch=_decode_batch(message.batch) if message.HasField("batch") else None,
        groups=_decode_groups(message.hydragen) if message.HasField("hydragen") else None,
        micro_batch_rows=tuple(message.micro_batch_rows),
    )


def encode_result(output: StepOutput, queued_ns: int, queued_plans: int) -> plan_pb2.StepResult:
    """``queued_ns``: from the plan's arrival to its start; ``queued_plans``: received and not yet started."""
    sampled, timing = output.sampled, output.timing
    message = plan_pb2.StepResult(
        step=output.step,
        queued_plans=queued_plans,
        timing=plan_pb2.StepTiming(
            queued_ns=queued_ns,
            prepare_ns=timing.prepare,
            forward_ns=timing.forward,
            sample_ns=timing.sample,
            device_ns=timing.device,
            idle_ns=timing.idle,
        ),
    )
    good = sampled.finite
    if not good.all():
        for slot in sampled.slots[~good].tolist():
            failure = output.failures.get(slot, _NO_NUMBERS)
            cause = _FORBIDDEN if failure.forbidden else plan_pb2.FAILURE_CAUSE_UNSPECIFIED
            message.failures.add(slot=slot, message=failure.message, cause=cause)
    fill(message, "slots", sampled.slots[good])
    fill(message, "token_ids", sampled.token_ids[good])
    if sampled.logprobs is not None:
        fill(message, "logprobs", sampled.logprobs[good])
    if sampled.top_counts is not None and sampled.top_token_ids is not None and sampled.top_logprobs is not None:
        kept = np.repeat(good, sampled.top_counts)
        fill(message, "top_counts", sampled.top_counts[good])
        fill(message, "top_token_ids", sampled.top_token_ids[kept])
        fill(message, "top_logprobs", sampled.top_logprobs[kept])
    for scored in output.scored:
        scores = message.prompts.add(slot=scored.slot, start=scored.start)
        fill(scores, "logprobs", scored.logprobs)
        fill(scores, "ranks", scored.ranks)
        fill(scores, "top_token_ids", scored.top_token_ids.reshape(-1))
        fill(scores, "top_logprobs", scored.top_logprobs.reshape(-1))
    return message


def _decode_admission(message: plan_pb2.Admission) -> Admission:
    sampling = message.sampling
    return Admission(
        slot=message.slot,
        token_ids=_integers(message.token_ids),
        cached_tokens=message.cached_tokens,
        pages=_integers(message.pages),
        sampling=SamplingSettings(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            sample_index=sampling.sample_index,
            logprobs=sampling.logprobs,
            top_logprobs=sampling.top_logprobs,
            bias_token_ids=_integers(sampling.logit_bias_token_ids),
            bias_values=read_float(sampling.logit_bias_values),
            repetition_penalty=sampling.repetition_penalty or 1.0,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            grammar=sampling.grammar,
            processed_logprobs=sampling.processed_logprobs,
            prompt_logprobs_start=sampling.prompt_logprobs_start,
            thinking=_decode_thinking(sampling.thinking) if sampling.HasField("thinking") else None,
        ),
        prompt_tokens=message.prompt_tokens,
    )


def _decode_thinking(message: plan_pb2.ThinkingBudget) -> ThinkingBudget:
    begin = message.begin_token_id if message.HasField("begin_token_id") else None
    return ThinkingBudget(message.tokens, message.end_token_id, begin)


def _decode_batch(message: plan_pb2.Batch) -> Batch:
    slots, counts = _integers(message.slots), _integers(message.token_counts)
    return Batch(slots, counts if len(counts) else np.ones_like(slots))


def _decode_groups(message: plan_pb2.HydragenGroups) -> Groups:
    return Groups(_integers(message.starts), _integers(message.counts), _integers(message.prefix_pages))


def _integers(field: Sequence[int]) -> np.ndarray:
    """Signed and wide, so that arithmetic on indices cannot wrap."""
    return read_fixed32(field).astype(np.int64) if field else _NONE
