"""Thinking budgets: the token that ends a reasoning section is forced where its budget is used up.

Whether a section is open follows from the sequence's tokens alone, which the cache keeps beside keys and values. So the
decision needs no state: it is the same after a preemption, a resumption or on another worker. ``triton_force`` is the
same for the GPU.
"""

import numpy as np
import torch

from services.common.thinking import OPENING_TOKENS
from services.worker.step.slots import SlotTable


def forced_tokens(
    slots: np.ndarray, positions: np.ndarray, table: SlotTable, tokens: torch.Tensor | None
) -> dict[int, int]:
    """Return the tokens that rows of ``slots [rows]`` have to sample, by row.

    ``positions [rows]`` are the lengths of the sequences, whose tokens are in ``tokens [page_count, page_size]`` int32.
    """
    forced = {}
    for row in np.flatnonzero(table.may_force(slots, positions)).tolist():
        if tokens is None:
            raise ValueError("rows with a thinking budget: pass the cache's token ids")
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
    """Rule out every token of ``logits [rows, vocab]`` but the one that its row has to sample.

    A row that a grammar does not let sample this token is left as it is: the next step tries again.
    """
    for row, token in forced.items():
        value = logits[row, token].clone()
        if value > -torch.inf:
            logits[row] = -torch.inf
            logits[row, token] = value
