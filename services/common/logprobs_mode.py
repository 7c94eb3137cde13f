"""Which distribution log-probabilities are of: the flag ``logprobs_mode`` and the parameter of a request."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

RAW: Literal["raw"] = "raw"
PROCESSED: Literal["processed"] = "processed"
_VLLM = {"raw_logprobs": RAW, "processed_logprobs": PROCESSED}


def _ours(value: Any) -> Any:
    """Return vLLM's name of a mode as ours. Raises ValueError for its modes that return logits."""
    if value in ("raw_logits", "processed_logits"):
        raise ValueError(
            f"{value!r}: this server returns log-probabilities and no logits; expected 'raw' or 'processed'"
        )
    return _VLLM.get(value, value) if isinstance(value, str) else value


LogprobsMode = Annotated[Literal["raw", "processed"], BeforeValidator(_ours)]
