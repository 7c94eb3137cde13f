"""Plans as messages of ``tokasaurus.worker.v1``."""

from collections.abc import Sequence

import numpy as np

from services.common.packed import read_fixed32, read_float
from services.common.plan.types import Admission, Batch, Groups, Limits, Plan, SamplingSettings
from services.common.thinking import ThinkingBudget
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

_NONE = np.empty(0, np.int64)


def decode_limits(info: worker_pb2.WorkerInfo) -> Limits:
    """Return what plans for the worker must fit."""
    return Limits(
        page_size=info.page_size,
        page_count=info.page_count,
        max_slots=info.max_slots,
        max_tokens_per_step=info.max_tokens_per_step,
        max_context_tokens=info.max_context_tokens,
        vocab_size=info.vocab_size,
        max_top_logprobs=info.max_top_logprobs,
        hydragen=info.hydragen,
        max_micro_batches=max(1, info.max_micro_batches),
        grammars=info.grammars,
        prompt_logprobs=info.prompt_logprobs,
        processed_logprobs=info.processed_logprobs,
        thinking_budgets=info.thinking_budgets,
    )


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
    )


def _decode_sampling(message: plan_pb2.SamplingSettings) -> SamplingSettings:
    return SamplingSettings(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        sample_index=message.sample_index,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        bias_token_ids=_integers(message.logit_bias_token_ids),
        bias_values=read_float(message.logit_bias_values),
        repetition_penalty=message.repetition_penalty or 1.0,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=message.grammar,
        processed_logprobs=message.processed_logprobs,
        prompt_logprobs_start=message.prompt_logprobs_start,
        thinking=_decode_thinking(message.thinking) if message.HasField("thinking") else None,
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
    """Return an int64 array: signed and wide, so that arithmetic on indices cannot wrap."""
    return read_fixed32(field).astype(np.int64) if field else _NONE
