"""Sizes of a worker, and whether an admission fits them."""

import math
from typing import Protocol

import numpy as np

from services.common.packed import read_fixed32, read_float
from services.scheduler.record.violation import require
from tokasaurus.worker.v1 import plan_pb2


class WorkerLimits(Protocol):
    """What plans must fit into; a ``WorkerInfo`` is one."""

    page_size: int
    page_count: int
    max_slots: int
    max_tokens_per_step: int
    max_context_tokens: int
    vocab_size: int
    max_top_logprobs: int
    hydragen: bool
    max_micro_batches: int
    prompt_logprobs: bool
    grammars: bool
    processed_logprobs: bool
    thinking_budgets: bool


def most_pages(limits: WorkerLimits) -> int:
    """Of one page table: a sequence may own a page more than it fills."""
    return -(-limits.max_context_tokens // limits.page_size) + 1


def check_admission(admission: plan_pb2.Admission, tokens: np.ndarray, pages: np.ndarray, limits: WorkerLimits) -> None:
    """Whatever the worker's state. ``tokens`` uint32 and ``pages`` int64: the admission's own, unpacked."""
    slot, cached = admission.slot, admission.cached_tokens
    require(slot < limits.max_slots, f"admission, and the worker has {limits.max_slots} slots", slot=slot)
    require(0 < len(tokens) < limits.max_context_tokens, f"admission with {len(tokens)} tokens", slot=slot)
    require(tokens.max() < limits.vocab_size, "admission with a token outside the vocabulary", slot=slot)
    require(cached < len(tokens), f"cached_tokens={cached} leaves nothing to compute", slot=slot)
    require(cached <= len(pages) * limits.page_size, f"cached_tokens={cached} do not fit its pages", slot=slot)
    require(len(pages) <= most_pages(limits), "a page table longer than the context", slot=slot)
    require(not len(pages) or pages.max() < limits.page_count, "a page outside the pool", slot=slot)
    require(len(set(pages.tolist())) == len(pages), "a page twice in one page table", slot=slot)
    require(admission.HasField("sampling"), "admission without sampling settings", slot=slot)
    check_sampling(admission.sampling, slot, limits)
    start, prompt = admission.sampling.prompt_logprobs_start, admission.prompt_tokens or len(tokens)
    require(start < prompt, f"prompt_logprobs_start={start} of a prompt of {prompt} tokens", slot=slot)


def check_sampling(settings: plan_pb2.SamplingSettings, slot: int, limits: WorkerLimits) -> None:
    """The same ranges as `services/worker/step/checks.py`; comparisons that a NaN fails."""
    require(0 <= settings.temperature < math.inf, f"temperature={settings.temperature}", slot=slot)
    require(0 < settings.top_p <= 1, f"top_p={settings.top_p}", slot=slot)
    require(0 <= settings.min_p <= 1, f"min_p={settings.min_p}", slot=slot)
    repetition = settings.repetition_penalty
    require(0 <= repetition < math.inf, f"repetition_penalty={repetition}", slot=slot)
    require(-2 <= settings.frequency_penalty <= 2, f"frequency_penalty={settings.frequency_penalty}", slot=slot)
    require(-2 <= settings.presence_penalty <= 2, f"presence_penalty={settings.presence_penalty}", slot=slot)
    most_top = min(limits.max_top_logprobs, limits.vocab_size)
    require(settings.top_logprobs <= most_top, f"top_logprobs={settings.top_logprobs}", slot=slot)
    if settings.HasField("prompt_logprobs"):
        require(limits.prompt_logprobs, "prompt_logprobs, which the worker does not compute", slot=slot)
        require(settings.prompt_logprobs <= most_top, f"prompt_logprobs={settings.prompt_logprobs}", slot=slot)
    processed = settings.processed_logprobs
    require(limits.processed_logprobs or not processed, "processed_logprobs, which the worker lacks", slot=slot)
    if settings.HasField("thinking"):
        require(limits.thinking_budgets, "a thinking budget, which the worker lacks", slot=slot)
        tokens = settings.thinking.begin_token_id, settings.thinking.end_token_id
        require(max(tokens) < limits.vocab_size, "a thinking token outside the vocabulary", slot=slot)
    require(limits.grammars or not settings.grammar, "a grammar, which the worker does not follow", slot=slot)
    biased, values = settings.logit_bias_token_ids, settings.logit_bias_values
    require(len(biased) == len(values), "logit_bias arrays differ in length", slot=slot)
    if len(biased):
        require((read_fixed32(biased) < limits.vocab_size).all(), "a bias outside the vocabulary", slot=slot)
        require(np.isfinite(read_float(values)).all(), "logit_bias_values that are not finite", slot=slot)
