"""The sampled tokens of a step on the device, and their conversion to host values."""

from typing import NamedTuple

import numpy as np
import torch

from services.common.plan.top_logprobs import TopLogprobs
from services.worker.sampling.rows import SampleRows
from services.worker.step.output import Sampled


class SampledOnDevice(NamedTuple):
    """Results of a step in device memory, written by launches that may still be queued.

    ``logprobs`` is in the order of ``SampleRows.logprob_rows``, the last two are in the order of ``top_rows``.
    """

    token_ids: torch.Tensor  # [padded] int32, 0 in rows that are not finite
    finite: torch.Tensor  # [padded] uint8, 1 if every logit of the row is finite
    logprobs: torch.Tensor | None = None  # [logprob rows] float32; None if there are none
    top_token_ids: torch.Tensor | None = None  # [top rows, widest] int32, most likely first; None if there are none
    top_logprobs: torch.Tensor | None = None  # [top rows, widest] float32


def collect(
    slots: np.ndarray,
    token_ids: np.ndarray,
    finite: np.ndarray,
    rows: SampleRows | None = None,
    logprobs: torch.Tensor | None = None,
    top_token_ids: torch.Tensor | None = None,
    top_logprobs: torch.Tensor | None = None,
) -> Sampled:
    """Return the results of ``slots [n]`` as host values.

    ``rows`` and the three tensors, which are on the host, are needed only if a row asks for log-probabilities.
    """
    if rows is None or logprobs is None:
        return Sampled(slots, token_ids, finite)
    count = len(slots)
    values = np.full(count, np.nan, np.float32)
    values[rows.logprob_rows] = logprobs.numpy()
    if top_token_ids is None or top_logprobs is None:
        return Sampled(slots, token_ids, finite, values)
    counts = np.zeros(count, np.int64)
    order = np.argsort(rows.top_rows)
    best = top_logprobs.numpy()[order]
    # A row with processed log-probabilities may have fewer drawable tokens than requested. The others are at -inf.
    kept = (np.arange(rows.widest) < rows.top_counts[order][:, None]) & (best != -np.inf)
    counts[rows.top_rows[order]] = kept.sum(axis=1)
    top_ids = top_token_ids.numpy()[order][kept].astype(np.int64)
    return Sampled(slots, token_ids, finite, values, TopLogprobs(counts, top_ids, best[kept]))
