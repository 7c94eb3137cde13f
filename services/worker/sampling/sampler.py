"""Sampling of tokens from hidden states with any mix of sampling settings, in slices of rows."""

from collections.abc import Callable

import numpy as np
import torch

from services.worker.sampling.draw import draw
from services.worker.sampling.grammars import RowMasks
from services.worker.sampling.logprobs import row_logprobs
from services.worker.sampling.penalties import penalise_
from services.worker.sampling.thinking import force_, forced_tokens
from services.worker.sampling.truncation import thresholds
from services.worker.step.noise import COLDEST, keys_at, row_keys
from services.worker.step.output import Sampled
from services.worker.step.slots import SlotTable

# Maps hidden rows, their scales and keys to tokens, and to whether their logits are finite, as ``PlainHead`` does.
PlainSampler = Callable[[torch.Tensor, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
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
    plain: PlainSampler | None = None,
) -> Sampled:
    """Sample a token for each row of ``hidden [rows, hidden_size]``; row i belongs to slot ``slots[i]``.

    ``positions [rows]`` are the positions of the sampled tokens in their sequences. ``to_logits`` maps hidden rows to
    float32 logits that may be overwritten. ``tokens [page_count, page_size]`` int32 are the cache's token ids, which
    rows with penalties or a thinking budget need. ``masks`` are the masks of rows with a grammar. ``plain`` is
    used if no row needs more than a temperature.

    The order is: bias, penalties, masks, forced tokens, temperature, top-k, top-p, min-p. Raw log-probabilities are
    computed after the penalties, processed ones after all steps.

    Raises ``ValueError`` if ``tokens`` is None and a row needs it.
    """
    if plain is not None and table.are_plain(slots, positions):
        chosen, finite = plain(hidden, table.scales[slots], keys_at(table.stems[slots], positions))
        return Sampled(slots, chosen, finite & ~table.failed[slots])
    rows = max(1, SLICE_ELEMENTS // vocab_size)
    parts = []
    for start in range(0, len(slots), rows):
        part = slice(start, start + rows)
        inside = None if masks is None else masks.within(start, start + rows)
        parts.append(_sample_slice(to_logits(hidden[part]), slots[part], positions[part], table, tokens, inside))
    return Sampled.join(parts)


def _sample_slice(
    logits: torch.Tensor,
    slots: np.ndarray,
    positions: np.ndarray,
    table: SlotTable,
    tokens: torch.Tensor | None,
    masks: RowMasks | None,
) -> Sampled:
    # A sum is not finite if any term is not. It needs one pass and no boolean tensor of the size of the logits.
    finite = torch.isfinite(logits.sum(dim=-1))
    for row in np.flatnonzero(table.biased[slots]).tolist():
        token_ids, values = (torch.from_numpy(array).to(logits.device) for array in table.biases[int(slots[row])])
        logits[row].index_put_((token_ids,), values, accumulate=True)
    if table.penalised[slots].any():
        if tokens is None:
            raise ValueError("tokens is None, but rows have penalties; pass the cache's token ids")
        penalise_(logits, slots, positions, table, tokens)

    forced = forced_tokens(slots, positions, table, tokens) if table.budgets else {}
    asked = table.logprobs[slots]
    drawn = logits if masks is None and not forced else _mask(logits, masks, forced, keep=bool(asked.any()))
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
    logprobs = row_logprobs(logits, chosen, asked, table.top_logprobs[slots], processed)
    good = finite.cpu().numpy() & ~table.failed[slots]
    return Sampled(slots, chosen.cpu().numpy(), good, *logprobs)


def _mask(logits: torch.Tensor, masks: RowMasks | None, forced: dict[int, int], *, keep: bool) -> torch.Tensor:
    """Return ``logits``, or a copy if ``keep`` is true, with -inf for tokens that cannot be drawn.

    These are the tokens that ``masks`` do not allow, and in each row of ``forced`` all but the forced token.
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
    """Return the logits ``[n, vocab]`` whose softmax is the distribution that ``rows [n]`` were drawn from.

    ``drawn`` holds the logits of all rows before the temperature, and ``lowest [all rows, 1]`` the bounds from
    ``_draw_rows``. The scale of a greedy row is 1.
    """
    index = torch.from_numpy(rows).to(drawn.device)
    scales = np.where(temperature > 0, 1 / np.maximum(temperature, COLDEST), np.float32(1))
    scaled = drawn[index] * torch.from_numpy(scales).to(drawn.device).unsqueeze(1)
    return scaled if lowest is None else scaled.masked_fill_(scaled < lowest[index], -torch.inf)


def _draw_rows(
    logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, table: SlotTable
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw a token for each row after temperature, top-k, top-p and min-p. ``logits`` are not changed.

    Returns the tokens ``[rows]`` int64, and the lowest scaled logit that can be drawn, ``[rows, 1]``; None allows all.
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
