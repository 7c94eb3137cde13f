"""Plans as the scheduler's messages: ``services.worker.step.codec`` the other way round."""

from services.common.packed import fill
from services.common.plan.types import Plan
from tokasaurus.worker.v1 import plan_pb2

_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "sample_index", "logprobs", "top_logprobs", "repetition_penalty",
    "frequency_penalty", "presence_penalty",
)  # fmt: skip


def encode(plan: Plan) -> plan_pb2.StepPlan:
    """Without grammars, micro-batches and scored prompts, which ``RandomPlans`` has none of."""
    message = plan_pb2.StepPlan(step=plan.step)
    for name, values in (
        ("release_slots", plan.releases),
        ("append_slots", plan.append_slots),
        ("append_pages", plan.append_pages),
        ("copy_source_pages", plan.copy_sources),
        ("copy_target_pages", plan.copy_targets),
    ):
        fill(message, name, values)
    for each in plan.admissions:
        sampling = plan_pb2.SamplingSettings(**{name: getattr(each.sampling, name) for name in _SETTINGS})
        fill(sampling, "logit_bias_token_ids", each.sampling.bias_token_ids)
        fill(sampling, "logit_bias_values", each.sampling.bias_values)
        added = message.admissions.add(
            slot=each.slot, cached_tokens=each.cached_tokens, prompt_tokens=each.prompt_tokens, sampling=sampling
        )
        fill(added, "token_ids", each.token_ids)
        fill(added, "pages", each.pages)
    if plan.batch is not None:
        message.batch.SetInParent()
        fill(message.batch, "slots", plan.batch.slots)
        fill(message.batch, "token_counts", plan.batch.token_counts)
    if plan.groups is not None:
        message.hydragen.SetInParent()
        for name in ("starts", "counts", "prefix_pages"):
            fill(message.hydragen, name, getattr(plan.groups, name))
    return message
