"""Logits to tokens, for any mix of sampling settings, in slices of rows."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.sampling.draw import draw
from services.worker.sampling.grammars import RowMasks
from services.worker.sampling.logprobs import RowLogprobs, join
from services.worker.sampling.penalties import penalise_
from services.worker.sampling.thinking import force_, forced_tokens
from services.worker.sampling.truncation import thresholds
from services.worker.step.noise import COLDEST, row_keys
from services.worker.step.plan import Sampled
from services.worker.step.slots import SlotTable

# Logits of one slice, in elements: 64 MiB in float32.
SLICE_ELEMENTS = 16 * 1024 * 1024


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
    """Sample a token for each row of ``hidden [rows, hidden_size]``, which belong to ``slots [rows]``.

    ``positions [rows]`` are the positions that the sampled tokens take in their sequences. ``to_logits`` maps hidden
    rows to float32 logits that may be overwritten. ``tokens`` are the cache's token ids, for rows with penalties or a
    thinking budget. ``masks`` are those of rows with a grammar.

    The order is: bias, penalties, masks, forced tokens, temperature, top-k, top-p, min-p. Raw log-probabilities are of
    the logits after the penalties, processed ones of the logits after all of these.
    """
    rows = max(1, SLICE_ELEMENTS // vocab_size)
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

    forced = forced_tokens(slots, positions, table, tokens) if table.budgets else {}
    asked = table.logprobs[slots]
    drawn = logits if masks is None and not forced else _ruled_out(logits, masks, forced, keep=bool(asked.any()))
    hot = np.flatnonzero(table.temperature[slots] > 0)
    lowest = None
    if len(hot) == 0:
        chosen = drawn.argmax(dim=-1)
    elif len(hot) == len(slots):
        chosen, lowest = _draw_rows(drawn, slots, positions, table)
    else:
        chosen = drawn.argmax(dim=-1)
        index = torch.from_numpy(hot).to(logits.device)
        chosen[index], bounds = _draw_rows(drawn[index], slots[hot], positions[hot], table)
        if bounds is not None:
            lowest = torch.full((len(slots), 1), -torch.inf, device=logits.device)
            lowest[index] = bounds
    processed = None
    if len(rows := np.flatnonzero(asked & table.processed[slots])):
        processed = rows, _distribution(drawn, lowest, rows, table.temperature[slots[rows]])
    found = RowLogprobs.of(logits, chosen, asked, table.top_logprobs[slots], processed)
    good = finite.cpu().numpy() & ~table.failed[slots]
    return Sampled(slots, chosen.cpu().numpy(), good, *found)


def _ruled_out(logits: torch.Tensor, masks: RowMasks | None, forced: dict[int, int], *, keep: bool) -> torch.Tensor:
    """Return ``logits``, or a copy with ``keep``, with minus infinity for tokens that cannot be drawn.

    These are the ones that ``masks`` rule out, and all but the token of each row in ``forced``.
    """
    drawn = logits.clone() if keep else logits
    if masks is not None:
        for row, allowed in zip(masks.rows.tolist(), masks.allowed(logits.shape[1]), strict=True):
            drawn[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
    force_(drawn, forced)
    return drawn


def _distribution(
    drawn: torch.Tensor, lowest: torch.Tensor | None, rows: np.ndarray, temperature: np.ndarray
) -> torch.Tensor:
    """Return the logits ``[n, vocab]`` whose softmax ``rows [n]`` of ``drawn`` were drawn from.

    ``lowest [all rows, 1]`` are the bounds of ``_draw_rows``. A greedy row has no temperature, so its scale is 1.
    """
    index = torch.from_numpy(rows).to(drawn.device)
    scales = np.where(temperature > 0, 1 / np.maximum(temperature, COLDEST), np.float32(1))
    scaled = drawn[index] * torch.from_numpy(scales).to(drawn.device).unsqueeze(1)
    return scaled if lowest is None else scaled.masked_fill_(scaled < lowest[index], -torch.inf)


def _draw_rows(
    logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, table: SlotTable
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw a token for each row after temperature, top-k, top-p and min-p. Leaves ``logits`` as they are.

    Returns the tokens ``[rows]`` int64, and the lowest scaled logit that can be drawn, ``[rows, 1]``; None = all can.
    """

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
    return draw(logits, scales, lowest, keys), lowest
