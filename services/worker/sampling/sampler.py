"""Logits to tokens, for any mix of sampling settings, in slices of rows."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.runner.plan import Sampled
from services.worker.runner.slots import SlotTable
from services.worker.sampling.draw import draw
from services.worker.sampling.grammars import RowMasks
from services.worker.sampling.logprobs import RowLogprobs, join
from services.worker.sampling.noise import COLDEST, row_keys
from services.worker.sampling.penalties import penalise_
from services.worker.sampling.truncation import thresholds

# Logits of one slice, in elements: 64 MiB in float32.
_SLICE_ELEMENTS = 16 * 1024 * 1024


def sample(
    hidden: torch.Tensor,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    slots: np.ndarray,
    positions: np.ndarray,
    table: SlotTable,
    vocab_size: int,
    tokens: torch.Tensor | None = None,
    masks: RowMasks | None = None,
) -> Sampled:
    """One token for each row of ``hidden [rows, hidden_size]``, which belong to ``slots [rows]``.

    ``positions [rows]`` are the places in their sequences that the sampled tokens take. ``to_logits`` maps hidden rows
    to float32 logits that may be overwritten. ``tokens``: the cache's token ids, for rows with penalties. ``masks``: of
    rows with a grammar.

    In this order: bias, penalties, and (for what is drawn, not for logprobs) masks, temperature, top-k, top-p, min-p.
    """
    rows = max(1, _SLICE_ELEMENTS // vocab_size)
    parts = []
    for start in range(0, len(slots), rows):
        part = slice(start, start + rows)
        inside = None if masks is None else masks.within(start, start + rows)
        parts.append(_sample_slice(to_logits(hidden[part]), slots[part], positions[part], table, tokens, inside))
    return parts[0] if len(parts) == 1 else concatenate(parts)


def concatenate(parts: Sequence[Sampled]) -> Sampled:
    """Several parts of a batch, in order, as one."""
    logprobs, top_counts, top_token_ids, top_logprobs = join(
        [RowLogprobs(part.logprobs, part.top_counts, part.top_token_ids, part.top_logprobs) for part in parts],
        [len(part.slots) for part in parts],
    )
    return Sampled(
        slots=np.concatenate([part.slots for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        finite=np.concatenate([part.finite for part in parts]),
        logprobs=logprobs,
        top_counts=top_counts,
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
    )


NOTHING = Sampled(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool))


def _sample_slice(
    logits: torch.Tensor,
    slots: np.ndarray,
    positions: np.ndarray,
    table: SlotTable,
    tokens: torch.Tensor | None,
    masks: RowMasks | None,
) -> Sampled:
    # A sum is not finite when any of its terms is not: one pass, no mask of the size of the logits.
    finite = torch.isfinite(logits.sum(dim=-1))
    for row in np.flatnonzero(table.biased[slots]).tolist():
        token_ids, values = (torch.from_numpy(array).to(logits.device) for array in table.biases[int(slots[row])])
        logits[row].index_put_((token_ids,), values, accumulate=True)
    if table.penalised[slots].any():
        if tokens is None:
            raise ValueError("rows with penalties: pass the cache's token ids")
        penalise_(logits, slots, positions, table, tokens)

    drawn = logits if masks is None else _masked(logits, masks, keep=bool(table.logprobs[slots].any()))
    hot = np.flatnonzero(table.temperature[slots] > 0)
    if len(hot) == 0:
        chosen = drawn.argmax(dim=-1)
    elif len(hot) == len(slots):
        chosen = _draw_rows(drawn, slots, positions, table)
    else:
        chosen = drawn.argmax(dim=-1)
        index = torch.from_numpy(hot).to(logits.device)
        chosen[index] = _draw_rows(drawn[index], slots[hot], positions[hot], table)
    found = RowLogprobs.of(logits, chosen, table.logprobs[slots], table.top_logprobs[slots])
    good = finite.cpu().numpy() & ~table.failed[slots]
    return Sampled(slots, chosen.cpu().numpy(), good, *found)


def _masked(logits: torch.Tensor, masks: RowMasks, *, keep: bool) -> torch.Tensor:
    """``logits``, or a copy when they are to be kept, with minus infinity for what ``masks`` rule out."""
    masked = logits.clone() if keep else logits
    for row, allowed in zip(masks.rows.tolist(), masks.allowed(logits.shape[1]), strict=True):
        masked[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
    return masked


def _draw_rows(logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, table: SlotTable) -> torch.Tensor:
    """Tokens ``[rows]`` int64 drawn after temperature, top-k, top-p and min-p. Leaves ``logits`` as they are."""

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device)

    def unless(off: float, values: np.ndarray) -> torch.Tensor | None:
        return None if (values == off).all() else column(values)

    scales = column(1 / np.maximum(table.temperature[slots], COLDEST))
    keys = column(row_keys(table.seed[slots], table.sample_index[slots], positions.astype(np.uint64)))
    top_k, top_p = unless(0, table.top_k[slots]), unless(1, table.top_p[slots])
    min_p = unless(0, table.min_p[slots])
    lowest = None
    if top_k is not None or top_p is not None or min_p is not None:
        lowest = thresholds(logits * scales.unsqueeze(1), top_k, top_p, min_p)
    return draw(logits, scales, lowest, keys)
