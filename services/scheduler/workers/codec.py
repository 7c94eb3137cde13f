"""Conversion of the worker's facts to the sizes that the core uses."""

from services.scheduler.core.request import WorkerShape
from tokasaurus.worker.v1 import worker_pb2


def decode_shape(info: worker_pb2.WorkerInfo, max_context_tokens: int) -> WorkerShape:
    """Return the worker's sizes. The context is the smaller one of the model and the worker."""
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
