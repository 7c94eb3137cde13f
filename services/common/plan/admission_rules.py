"""Rules about one admission, whatever the state of the worker."""

from typing import TYPE_CHECKING

import numpy as np

from services.common.plan.types import Admission, WorkerLimits
from services.common.plan.verdict import BrokenPlan, check_pages, check_tokens
from services.common.sampling import out_of_range

if TYPE_CHECKING:  # the rules of plans import no messages
    from tokasaurus.common.v1.sampling_pb2 import Sampling


def check_admission(admission: Admission, field: str, limits: WorkerLimits) -> None:
    """Raise ``BrokenPlan`` for the first breach. ``field`` is the path of the admission."""
    slot, tokens, pages, cached = admission.slot, admission.token_ids, admission.pages, admission.cached_tokens
    if slot >= limits.max_slots:
        raise BrokenPlan.part(field, "slot", f"slot {slot} of max_slots={limits.max_slots}", slot)
    if not 0 < len(tokens) <= limits.max_context_tokens:
        message = f"{len(tokens)} tokens, expected 1 to max_context_tokens={limits.max_context_tokens}"
        raise BrokenPlan.part(field, "token_ids", message, slot)
    check_tokens(tokens, f"{field}.token_ids", limits, slot)
    if cached >= len(tokens):
        message = f"cached_tokens={cached} must be less than the {len(tokens)} tokens known"
        raise BrokenPlan.part(field, "cached_tokens", message, slot)
    if admission.prompt_tokens > len(tokens):
        message = f"prompt_tokens={admission.prompt_tokens}: expected at most the {len(tokens)} tokens known"
        raise BrokenPlan.part(field, "prompt_tokens", message, slot)
    check_pages(pages, f"{field}.pages", limits, slot)
    if len(pages) > (most := limits.max_pages_per_slot):
        message = f"{len(pages)} pages, at most {most} hold max_context_tokens={limits.max_context_tokens}"
        raise BrokenPlan.part(field, "pages", message, slot)
    if cached > len(pages) * limits.page_size:
        message = f"cached_tokens={cached} do not fit into {len(pages)} pages of {limits.page_size} tokens"
        raise BrokenPlan.part(field, "pages", message, slot)
    if admission.routed_start is not None and limits.routed_experts is None:
        message = "routed_experts_start, but this worker's WorkerInfo.routed_experts is unset: leave it out"
        raise BrokenPlan.part(field, "routed_experts_start", message, slot)
    _check_sampling(admission, f"{field}.sampling", limits)


def _check_sampling(admission: Admission, field: str, limits: WorkerLimits) -> None:
    settings, slot, most = admission.sampling, admission.slot, limits.most_top_logprobs
    for name, value in (("top_logprobs", settings.top_logprobs), ("prompt_logprobs", settings.prompt_logprobs or 0)):
        if value > most:
            raise BrokenPlan.part(field, name, f"{name}={value}: expected at most {most}", slot)
    start, length = settings.prompt_logprobs_start, admission.prompt_length
    if settings.prompt_logprobs is not None and start >= length:
        message = f"prompt_logprobs_start={start}: expected less than the {length} tokens of the prompt"
        raise BrokenPlan.part(field, "prompt_logprobs_start", message, slot)
    if settings.parameters is None:
        raise BrokenPlan(f"{field}.parameters is not set", field=f"{field}.parameters", slot=slot)
    needs = (
        ("prompt_logprobs", "prompt_logprobs", settings.prompt_logprobs is not None),
        ("processed_logprobs", "processed_logprobs", settings.processed_logprobs),
        ("parameters.thinking", "thinking_budgets", settings.parameters.HasField("thinking")),
        ("grammar", "grammars", bool(settings.grammar)),
    )
    for name, capability, asked in needs:
        if asked and not getattr(limits, capability):
            message = f"{name}, but this worker's WorkerInfo.{capability} is false: leave it empty"
            raise BrokenPlan.part(field, name, message, slot)
    _check_parameters(settings.parameters, f"{field}.parameters", slot, limits)


def _check_parameters(parameters: "Sampling", field: str, slot: int, limits: WorkerLimits) -> None:
    if found := out_of_range(parameters):
        name, message = found
        raise BrokenPlan.part(field, name, message, slot)
    if parameters.HasField("thinking"):
        thinking = parameters.thinking
        ends = np.array([thinking.end_token_id, thinking.begin_token_id])
        check_tokens(ends[:1], f"{field}.thinking.end_token_id", limits, slot)
        check_tokens(ends[1:], f"{field}.thinking.begin_token_id", limits, slot)
    if not parameters.logit_bias_token_ids and not parameters.logit_bias_values:
        return
    tokens = np.array(parameters.logit_bias_token_ids, np.uint32)
    values = np.array(parameters.logit_bias_values, np.float32)
    if len(tokens) != len(values):
        raise BrokenPlan.parallel(field, slot, logit_bias_token_ids=len(tokens), logit_bias_values=len(values))
    check_tokens(tokens, f"{field}.logit_bias_token_ids", limits, slot)
    if not np.isfinite(values).all():
        raise BrokenPlan.part(field, "logit_bias_values", "logit_bias_values holds a value that is not finite", slot)
