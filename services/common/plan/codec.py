"""Plans and results as messages of ``tokasaurus.worker.v1``."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from services.common.packed import fill, read_fixed32, read_float
from services.common.plan.result import ScoredTokens, SlotFailure, StepResult, Timing
from services.common.plan.routed_experts import RoutedExperts, RoutedExpertsLayout
from services.common.plan.top_logprobs import TopLogprobs
from services.common.plan.types import Admission, Batch, Groups, Plan, SamplingSettings, WorkerLimits
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

_NONE = np.empty(0, np.int64)
_FORBIDDEN = plan_pb2.FAILURE_CAUSE_FORBIDDEN_TOKENS


def decode_limits(info: worker_pb2.WorkerInfo) -> WorkerLimits:
    """Return what plans for the worker must fit."""
    limits = {field.name: getattr(info, field.name) for field in dataclasses.fields(WorkerLimits)}
    routed, layout = info.routed_experts, None
    if info.HasField("routed_experts"):
        layout = RoutedExpertsLayout(routed.layers, routed.experts_per_token, routed.bytes_per_expert)
    return WorkerLimits(**limits | {"max_micro_batches": max(1, info.max_micro_batches), "routed_experts": layout})


def encode_plan(plan: Plan) -> plan_pb2.StepPlan:
    """Append arrays as packed bytes: no Python object for each row of the batch."""
    message = plan_pb2.StepPlan(step=plan.step)
    fill(message, "release_slots", plan.releases)
    _encode_admissions(message, plan.admissions)
    fill(message, "append_slots", plan.append_slots)
    fill(message, "append_pages", plan.append_pages)
    fill(message, "copy_source_pages", plan.copy_sources)
    fill(message, "copy_target_pages", plan.copy_targets)
    if plan.batch is not None:
        message.batch.SetInParent()
        fill(message.batch, "slots", plan.batch.slots)
        if (plan.batch.token_counts != 1).any():
            fill(message.batch, "token_counts", plan.batch.token_counts)
        message.micro_batch_rows.extend(plan.micro_batch_rows)
    if plan.groups is not None:
        message.hydragen.SetInParent()
        fill(message.hydragen, "starts", plan.groups.starts)
        fill(message.hydragen, "counts", plan.groups.counts)
        fill(message.hydragen, "prefix_pages", plan.groups.prefix_pages)
    return message


def _encode_admissions(message: plan_pb2.StepPlan, admissions: Sequence[Admission]) -> None:
    """Append ``admissions``. What siblings that follow each other have in common is encoded once."""
    last, encoded = None, b""
    for admission in admissions:
        if last is None or not _are_siblings(last, admission):
            last, encoded = admission, _encode_common(admission)
        added = message.admissions.add()
        added.MergeFromString(encoded)
        added.slot, added.sampling.sample_index = admission.slot, admission.sample_index
        fill(added, "pages", admission.pages)


def _are_siblings(one: Admission, other: Admission) -> bool:
    return (
        one.token_ids is other.token_ids
        and one.sampling is other.sampling
        and one.cached_tokens == other.cached_tokens
        and one.prompt_tokens == other.prompt_tokens
        and one.traceparent == other.traceparent
        and one.routed_start == other.routed_start
    )


def _encode_common(admission: Admission) -> bytes:
    """Return the fields that siblings share, as bytes of an ``Admission`` message."""
    common = plan_pb2.Admission(cached_tokens=admission.cached_tokens, traceparent=admission.traceparent)
    fill(common, "token_ids", admission.token_ids)
    if admission.prompt_tokens < len(admission.token_ids):  # 0 = all
        common.prompt_tokens = admission.prompt_tokens
    if admission.routed_start is not None:
        common.routed_experts_start = admission.routed_start
    settings, sampling = admission.sampling, common.sampling
    sampling.logprobs, sampling.top_logprobs = settings.logprobs, settings.top_logprobs
    sampling.processed_logprobs, sampling.grammar = settings.processed_logprobs, settings.grammar
    if settings.prompt_logprobs is not None:
        sampling.prompt_logprobs = settings.prompt_logprobs
        sampling.prompt_logprobs_start = settings.prompt_logprobs_start
    sampling.parameters.SetInParent()
    if settings.parameters is not None:
        sampling.parameters.CopyFrom(settings.parameters)
    return common.SerializeToString()


def decode_plan(message: plan_pb2.StepPlan) -> Plan:
    """Return the plan as it was sent. ``rules.check_plan`` judges it."""
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


def _decode_admission(message: plan_pb2.Admission) -> Admission:
    return Admission(
        slot=message.slot,
        token_ids=_integers(message.token_ids),
        cached_tokens=message.cached_tokens,
        pages=_integers(message.pages),
        sampling=_decode_sampling(message.sampling),
        prompt_tokens=message.prompt_tokens,
        sample_index=message.sampling.sample_index,
        traceparent=message.traceparent,
        routed_start=message.routed_experts_start if message.HasField("routed_experts_start") else None,
    )


def _decode_sampling(message: plan_pb2.SamplingSettings) -> SamplingSettings:
    return SamplingSettings(
        parameters=message.parameters if message.HasField("parameters") else None,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=message.grammar,
        processed_logprobs=message.processed_logprobs,
        prompt_logprobs_start=message.prompt_logprobs_start,
    )


def _decode_batch(message: plan_pb2.Batch) -> Batch:
    slots, counts = _integers(message.slots), _integers(message.token_counts)
    return Batch(slots, counts if len(counts) else np.ones_like(slots))


def _decode_groups(message: plan_pb2.HydragenGroups) -> Groups:
    return Groups(_integers(message.starts), _integers(message.counts), _integers(message.prefix_pages))


def encode_result(result: StepResult) -> plan_pb2.StepResult:
    """Append arrays as packed bytes: no Python object for each row."""
    timing = result.timing
    message = plan_pb2.StepResult(
        step=result.step,
        queued_plans=result.queued_plans,
        timing=plan_pb2.StepTiming(
            queued_ns=timing.queued,
            prepare_ns=timing.prepare,
            forward_ns=timing.forward,
            sample_ns=timing.sample,
            device_ns=timing.device,
            idle_ns=timing.idle,
        ),
    )
    for failure in result.failures:
        cause = _FORBIDDEN if failure.forbidden else plan_pb2.FAILURE_CAUSE_UNSPECIFIED
        message.failures.add(slot=failure.slot, message=failure.message, cause=cause)
    fill(message, "slots", result.slots)
    fill(message, "token_ids", result.tokens)
    fill(message, "logprobs", result.logprobs)
    if result.top is not None:
        fill(message, "top_counts", result.top.counts)
        fill(message, "top_token_ids", result.top.token_ids)
        fill(message, "top_logprobs", result.top.logprobs)
    for scored in result.scored:
        scores = message.prompts.add(slot=scored.slot, start=scored.start)
        fill(scores, "logprobs", scored.logprobs)
        fill(scores, "ranks", scored.ranks)
        fill(scores, "top_token_ids", scored.top.token_ids)
        fill(scores, "top_logprobs", scored.top.logprobs)
    if (routed := result.routed) is not None:
        fill(message.routed_experts, "slots", routed.owners)
        fill(message.routed_experts, "starts", routed.starts)
        fill(message.routed_experts, "token_counts", routed.counts)
        message.routed_experts.experts = routed.experts.tobytes()
    return message


def decode_result(message: plan_pb2.StepResult) -> StepResult:
    """Return the result as it was sent. ``result_rules.check_result`` judges it."""
    timing = message.timing
    return StepResult(
        step=message.step,
        slots=_integers(message.slots),
        tokens=_integers(message.token_ids),
        logprobs=read_float(message.logprobs),
        top=_decode_top(message),
        failures=tuple(SlotFailure(each.slot, each.message, each.cause == _FORBIDDEN) for each in message.failures),
        scored=tuple(_decode_scored(scores) for scores in message.prompts),
        timing=Timing(
            timing.prepare_ns,
            timing.forward_ns,
            timing.sample_ns,
            timing.device_ns,
            timing.idle_ns,
            timing.queued_ns,
        ),
        queued_plans=message.queued_plans,
        routed=_decode_routed(message.routed_experts) if message.HasField("routed_experts") else None,
    )


def _decode_routed(message: plan_pb2.RoutedExperts) -> RoutedExperts:
    slots, starts, counts = map(_integers, (message.slots, message.starts, message.token_counts))
    return RoutedExperts.read(slots, starts, counts, message.experts)


def _decode_top(message: plan_pb2.StepResult) -> TopLogprobs | None:
    if not (message.top_counts or message.top_token_ids or message.top_logprobs):
        return None
    return TopLogprobs(
        _integers(message.top_counts), read_fixed32(message.top_token_ids), read_float(message.top_logprobs)
    )


def _decode_scored(message: plan_pb2.PromptScores) -> ScoredTokens:
    logprobs, listed = read_float(message.logprobs), read_fixed32(message.top_token_ids)
    counts = np.full(len(logprobs), len(listed) // max(1, len(logprobs)))
    top = TopLogprobs(counts, listed, read_float(message.top_logprobs))
    return ScoredTokens(message.slot, message.start, logprobs, read_fixed32(message.ranks), top)


def _integers(field: Sequence[int]) -> np.ndarray:
    """Return an int64 array: signed and wide, so that arithmetic on indices cannot wrap."""
    return read_fixed32(field).astype(np.int64) if field else _NONE
