"""Estimates of the memory of plans and results, computed from the lengths of their arrays.

For a plan that admits 1,000 prompts of 1,000 tokens this takes 0.3 ms, and ``ByteSize``, which serializes, 15 ms.
"""

from google.protobuf.message import Message

from tokasaurus.worker.v1 import plan_pb2

_ELEMENT_BYTES = 4  # every array is of fixed32 or float
_MESSAGE_BYTES = 256  # approximate size of a message without its arrays
_PLAN_ARRAYS = (
    "release_slots", "append_slots", "append_pages", "copy_source_pages", "copy_target_pages", "micro_batch_rows",
)  # fmt: skip
_BATCH_ARRAYS = ("slots", "token_counts")
_GROUP_ARRAYS = ("starts", "counts", "prefix_pages")
_ADMISSION_ARRAYS = ("token_ids", "pages")
_BIAS_ARRAYS = ("logit_bias_token_ids", "logit_bias_values")
_SCORE_ARRAYS = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
_RESULT_ARRAYS = ("slots", "token_ids", "logprobs", "top_counts", "top_token_ids", "top_logprobs")


def plan_size(plan: plan_pb2.StepPlan) -> int:
    """Return an upper bound on the serialized size in bytes."""
    size = _of(plan, _PLAN_ARRAYS)
    if plan.HasField("batch"):
        size += _of(plan.batch, _BATCH_ARRAYS)
    if plan.HasField("hydragen"):
        size += _of(plan.hydragen, _GROUP_ARRAYS)
    for admission in plan.admissions:
        size += _of(admission, _ADMISSION_ARRAYS) + _of(admission.sampling.parameters, _BIAS_ARRAYS)
    return size


def result_size(result: plan_pb2.StepResult) -> int:
    """Return an upper bound on the serialized size in bytes."""
    failures = sum(_MESSAGE_BYTES + 4 * len(failure.message) for failure in result.failures)
    scores = sum([_of(scores, _SCORE_ARRAYS) for scores in result.prompts])
    return _of(result, _RESULT_ARRAYS) + failures + scores


def _of(message: Message, arrays: tuple[str, ...]) -> int:
    return _MESSAGE_BYTES + _ELEMENT_BYTES * sum([len(getattr(message, name)) for name in arrays])
