"""What a step sampled: on the device, and as the runner's plain values."""

from typing import NamedTuple

import numpy as np
import torch

from services.worker.runner.plan import Sampled
from services.worker.sampling.rows import SampleRows


class SampledOnDevice(NamedTuple):
    """Written by launches that may not have run yet. The last three are in the order of ``SampleRows.asked`` and
    ``top_rows``."""

    token_ids: torch.Tensor  # [padded] int32, 0 where not finite
    finite: torch.Tensor  # [padded] uint8, 1 where every logit was finite
    logprobs: torch.Tensor | None = None  # [asked] float32; None when no row asked
    top_token_ids: torch.Tensor | None = None  # [top rows, widest] int32, most likely first; None when no row asked
    top_logprobs: torch.Tensor | None = None  # beside top_token_ids, float32


def collect(found: SampledOnDevice, rows: SampleRows, failed: np.ndarray | None = None) -> Sampled:
    """``found``, whose tensors were copied to the host, as plain values.

    ``failed [rows]`` bool: rows whose sequences are known by now to be spoilt (``SlotTable.failed``).
    """
    count = len(rows.slots)
    token_ids = found.token_ids[:count].numpy().astype(np.int64)
    finite = found.finite[:count].numpy() != 0
    if failed is not None:
        finite &= ~failed
    if found.logprobs is None:
        return Sampled(rows.slots, token_ids, finite)
    logprobs = np.full(count, np.nan, np.float32)
    logprobs[rows.asked] = found.logprobs.numpy()
    if found.top_token_ids is None:
        return Sampled(rows.slots, token_ids, finite, logprobs)
    counts = np.zeros(count, np.int64)
    counts[rows.top_rows] = rows.top_counts
    order = np.argsort(rows.top_rows)
    kept = np.arange(rows.widest) < rows.top_counts[order][:, None]
    top_token_ids = found.top_token_ids.numpy()[order][kept].astype(np.int64)
    return Sampled(
        rows.slots, token_ids, finite, logprobs, counts, top_token_ids, found.top_logprobs.numpy()[order][kept]
    )
