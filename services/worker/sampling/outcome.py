"""What a step sampled: on the device, and as the runner's plain values."""

from typing import NamedTuple

import numpy as np
import torch

from services.common.plan.top_logprobs import TopLogprobs
from services.worker.sampling.rows import SampleRows
from services.worker.step.output import Sampled


class SampledOnDevice(NamedTuple):
    """Written by launches that may not have run yet. The last three are in the order of ``SampleRows.asked`` and
    ``top_rows``."""

    token_ids: torch.Tensor  # [padded] int32, 0 where not finite
    finite: torch.Tensor  # [padded] uint8, 1 where every logit was finite
    logprobs: torch.Tensor | None = None  # [asked] float32; None when no row asked
    top_token_ids: torch.Tensor | None = None  # [top rows, widest] int32, most likely first; None when no row asked
    top_logprobs: torch.Tensor | None = None  # beside top_token_ids, float32


def collect(
    slots: np.ndarray,
    token_ids: np.ndarray,
    finite: np.ndarray,
    rows: SampleRows | None = None,
    logprobs: torch.Tensor | None = None,
    top_token_ids: torch.Tensor | None = None,
    top_logprobs: torch.Tensor | None = None,
) -> Sampled:
    """What was sampled for ``slots [n]``, as plain values. What is behind ``rows`` was copied to the host; all four are
    of rows that asked for more than tokens."""
    if rows is None or logprobs is None:
        return Sampled(slots, token_ids, finite)
    count = len(slots)
    found = np.full(count, np.nan, np.float32)
    found[rows.asked] = logprobs.numpy()
    if top_token_ids is None or top_logprobs is None:
        return Sampled(slots, token_ids, finite, found)
    counts = np.zeros(count, np.int64)
    order = np.argsort(rows.top_rows)
    values = top_logprobs.numpy()[order]
    # A processed row has fewer tokens that can be drawn than it asked for: the others are at minus infinity.
    kept = (np.arange(rows.widest) < rows.top_counts[order][:, None]) & (values != -np.inf)
    counts[rows.top_rows[order]] = kept.sum(axis=1)
    top_ids = top_token_ids.numpy()[order][kept].astype(np.int64)
    return Sampled(slots, token_ids, finite, found, TopLogprobs(counts, top_ids, values[kept]))
