"""The flag and request parameter ``logprobs_mode``, which selects the distribution of log-probabilities."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

RAW: Literal["raw"] = "raw"
PROCESSED: Literal["processed"] = "processed"
_VLLM = {"raw_logprobs": RAW, "processed_logprobs": PROCESSED}


def _from_vllm(value: Any) -> Any:
    """Convert vLLM's names of modes. Raises ValueError for its modes that return logits."""
    if value in ("raw_logits", "processed_logits"):
        raise ValueError(
            f"{value!r}: this server returns log-probabilities and no logits; expected 'raw' or 'processed'"
        )
    return _VLLM.get(value, value) if isinstance(value, str) else value


LogprobsMode = Annotated[Literal["raw", "processed"], BeforeValidator(_from_vllm)]
