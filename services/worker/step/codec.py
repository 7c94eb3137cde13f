"""The output of a step as a wire message."""

from services.common.packed import fill
from services.worker.step.output import Failure, StepOutput
from tokasaurus.worker.v1 import plan_pb2

_NO_NUMBERS = Failure("the model's logits are not numbers")
_FORBIDDEN = plan_pb2.FAILURE_CAUSE_FORBIDDEN_TOKENS


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
    if sampled.top is not None:
        top = sampled.top[good]
        fill(message, "top_counts", top.counts)
        fill(message, "top_token_ids", top.token_ids)
        fill(message, "top_logprobs", top.logprobs)
    for scored in output.scored:
        scores = message.prompts.add(slot=scored.slot, start=scored.start)
        fill(scores, "logprobs", scored.logprobs)
        fill(scores, "ranks", scored.ranks)
        fill(scores, "top_token_ids", scored.top_token_ids.reshape(-1))
        fill(scores, "top_logprobs", scored.top_logprobs.reshape(-1))
    return message
