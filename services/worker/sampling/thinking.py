"""Thinking budgets: force the token that ends a reasoning section when its budget is used up.

The decision follows from the sequence's token ids in the KV cache alone. It therefore needs no state, and is the same
after a preemption or on another worker. ``triton_force`` implements it for the GPU.
"""

import numpy as np
import torch

from services.worker.step.slots import OPENING_TOKENS, SlotTable


def forced_tokens(
    slots: np.ndarray, positions: np.ndarray, table: SlotTable, tokens: torch.Tensor | None
) -> dict[int, int]:
    """Return the token that is forced in each row, by row. Rows without a forced token are absent.

    ``positions [rows]`` are the lengths of the sequences in ``slots [rows]``, and ``tokens [page_count, page_size]``
    int32 are the cache's token ids. Raises ``ValueError`` if ``tokens`` is None and a row has a budget.
    """
    forced = {}
    for row in np.flatnonzero(table.may_force(slots, positions)).tolist():
        if tokens is None:
            raise ValueError("tokens is None, but rows have a thinking budget; pass the cache's token ids")
        slot, length = int(slots[row]), int(positions[row])
        pages = torch.from_numpy(table.page_table[slot, : -(-length // tokens.shape[1])].astype(np.int64))
        answer = tokens[pages.to(tokens.device)].flatten()[int(table.prompt_tokens[slot]) : length].cpu().numpy()
        if (begin := int(table.think_begin[slot])) >= 0:
            opening = np.flatnonzero(answer[:OPENING_TOKENS] == begin)
            if not len(opening):
                continue
            answer = answer[opening[0] + 1 :]
        end = int(table.think_end[slot])
        if len(answer) >= table.think_tokens[slot] and not (answer == end).any():
            forced[row] = end
    return forced


def force_(logits: torch.Tensor, forced: dict[int, int]) -> None:
    """Set all logits of each row in ``forced`` to -inf, except that of the forced token.

    A row whose grammar does not allow the forced token is not changed. The next step tries again.
    """
    for row, token in forced.items():
        value = logits[row, token].clone()
        if value > -torch.inf:
            logits[row] = -torch.inf
            logits[row, token] = value
