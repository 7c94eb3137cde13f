"""Rules about one admission, whatever the state of the worker."""

import numpy as np

from services.common.plan.types import Admission, Limits, SamplingSettings
from services.common.plan.verdict import BrokenPlan, check_pages, check_tokens

_INFINITE = float("inf")


def check_admission(admission: Admission, field: str, limits: Limits) -> None:
    """Raise ``BrokenPlan`` for the first breach. ``field`` is the path of the admission."""
    slot, tokens, pages, cached = admission.slot, admission.token_ids, admission.pages, admission.cached_tokens
    if slot >= limits.max_slots:
        raise BrokenPlan(f"{field}: slot {slot} of max_slots={limits.max_slots}", field=f"{field}.slot", slot=slot)
    if not 0 < len(tokens) <= limits.max_context_tokens:
        raise BrokenPlan(
            f"{field}: {len(tokens)} tokens, expected 1 to max_context_tokens={limits.max_context_tokens}",
            field=f"{field}.token_ids",
            slot=slot,
        )
    check_tokens(tokens, f"{field}.token_ids", limits, slot)
    if cached >= len(tokens):
        raise BrokenPlan(
            f"{field}: cached_tokens={cached} must be less than the {len(tokens)} tokens known",
            field=f"{field}.cached_tokens",
            slot=slot,
        )
    if admission.prompt_tokens > len(tokens):
        raise BrokenPlan(
            f"{field}: prompt_tokens={admission.prompt_tokens}: expected at most the {len(tokens)} tokens known",
            field=f"{field}.prompt_tokens",
            slot=slot,
        )
    check_pages(pages, f"{field}.pages", limits, slot)
    if len(pages) > limits.max_pages_per_slot:
        raise BrokenPlan(
            f"{field}: {len(pages)} pages, at most {limits.max_pages_per_slot} hold"
            f" max_context_tokens={limits.max_context_tokens}",
            field=f"{field}.pages",
            slot=slot,
        )
    if cached > len(pages) * limits.page_size:
        raise BrokenPlan(
            f"{field}: cached_tokens={cached} do not fit into {len(pages)} pages of {limits.page_size} tokens",
            field=f"{field}.pages",
            slot=slot,
        )
    _check_sampling(admission, f"{field}.sampling", limits)


def _check_sampling(admission: Admission, field: str, limits: Limits) -> None:
    settings, slot = admission.sampling, admission.slot
    most = limits.most_top_logprobs
    ranges = (  # comparisons that a NaN fails
        ("temperature", settings.temperature, 0 <= settings.temperature < _INFINITE, "0 or more"),
        ("top_p", settings.top_p, 0 < settings.top_p <= 1, "more than 0, at most 1"),
        ("min_p", settings.min_p, 0 <= settings.min_p <= 1, "0 to 1"),
        (
            "repetition_penalty",
            settings.repetition_penalty,
            0 < settings.repetition_penalty < _INFINITE,
            "more than 0",
        ),
        ("frequency_penalty", settings.frequency_penalty, -2 <= settings.frequency_penalty <= 2, "-2 to 2"),
        ("presence_penalty", settings.presence_penalty, -2 <= settings.presence_penalty <= 2, "-2 to 2"),
        ("top_logprobs", settings.top_logprobs, settings.top_logprobs <= most, f"at most {most}"),
        ("prompt_logprobs", settings.prompt_logprobs, (settings.prompt_logprobs or 0) <= most, f"at most {most}"),
    )
    for name, value, good, expected in ranges:
        if not good:
            raise BrokenPlan(f"{field}.{name}={value}: expected {expected}", field=f"{field}.{name}", slot=slot)
    start, length = settings.prompt_logprobs_start, admission.prompt_length
    if settings.prompt_logprobs is not None and start >= length:
        raise BrokenPlan(
            f"{field}.prompt_logprobs_start={start}: expected less than the {length} tokens of the prompt",
            field=f"{field}.prompt_logprobs_start",
            slot=slot,
        )
    _check_capabilities(settings, field, slot, limits)
    if settings.thinking is not None:
        for name in ("end_token_id", "begin_token_id"):
            token = getattr(settings.thinking, name)
            if token is not None:
                check_tokens(np.array([token], np.int64), f"{field}.thinking.{name}", limits, slot)
    _check_biases(settings, field, slot, limits)


def _check_capabilities(settings: SamplingSettings, field: str, slot: int, limits: Limits) -> None:
    needs = (
        ("prompt_logprobs", "prompt_logprobs", settings.prompt_logprobs is not None),
        ("processed_logprobs", "processed_logprobs", settings.processed_logprobs),
        ("thinking", "thinking_budgets", settings.thinking is not None),
        ("grammar", "grammars", bool(settings.grammar)),
    )
    for name, capability, asked in needs:
        if asked and not getattr(limits, capability):
            raise BrokenPlan(
                f"{field}.{name}, but this worker's WorkerInfo.{capability} is false: leave it empty",
                field=f"{field}.{name}",
                slot=slot,
            )


def _check_biases(settings: SamplingSettings, field: str, slot: int, limits: Limits) -> None:
    tokens, values = settings.logit_bias_token_ids, settings.logit_bias_values
    if len(tokens) != len(values):
        raise BrokenPlan(
            f"{field}: {len(tokens)} logit_bias_token_ids and {len(values)} logit_bias_values: they are parallel",
            field=f"{field}.logit_bias_values",
            slot=slot,
        )
    check_tokens(tokens, f"{field}.logit_bias_token_ids", limits, slot)
    if not np.isfinite(values).all():
        raise BrokenPlan(
            f"{field}.logit_bias_values holds a value that is not finite", field=f"{field}.logit_bias_values", slot=slot
        )
