"""Repetition, frequency and presence penalties, from the token ids that the cache keeps beside keys and values."""

import numpy as np
import torch

from services.worker.step.slots import SlotTable


def penalise_(
    logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, table: SlotTable, tokens: torch.Tensor
) -> None:
    """Change ``logits [rows, vocab]`` float32 of the rows whose ``slots [rows]`` ask for it.

    ``positions [rows]``: how many tokens each sequence has, all of which are in ``tokens [page_count, page_size]``
    int32. The order is vLLM's: repetition (prompt and generated tokens), frequency, presence (generated tokens).
    """
    vocab = logits.shape[1]
    for row in np.flatnonzero(table.penalised[slots]).tolist():
        slot, length = int(slots[row]), int(positions[row])
        pages = torch.from_numpy(table.page_table[slot, : -(-length // tokens.shape[1])].astype(np.int64))
        said = tokens[pages.to(tokens.device)].flatten()[:length].long().to(logits.device)
        counts = torch.bincount(said[int(table.prompt_tokens[slot]) :], minlength=vocab).float()
        values, seen = logits[row], said.unique()
        repetition = float(table.repetition_penalty[slot])
        values[seen] = torch.where(values[seen] > 0, values[seen] / repetition, values[seen] * repetition)
        values -= float(table.frequency_penalty[slot]) * counts
        values -= float(table.presence_penalty[slot]) * (counts > 0)
