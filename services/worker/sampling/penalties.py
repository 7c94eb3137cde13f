"""Repetition, frequency and presence penalties, computed from the token ids in the KV cache."""

import numpy as np
import torch

from services.worker.step.slots import SlotTable


def penalise_(
    logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, table: SlotTable, tokens: torch.Tensor
) -> None:
    """Apply penalties in place to ``logits [rows, vocab]`` float32 of rows whose ``slots [rows]`` have them.

    ``positions [rows]`` are the lengths of the sequences, and ``tokens [page_count, page_size]`` int32 are the cache's
    token ids. The order is that of vLLM: repetition (of prompt and generated tokens), then frequency and
    presence (of generated tokens).
    """
    vocab = logits.shape[1]
    for row in np.flatnonzero(table.penalised[slots]).tolist():
        slot, length = int(slots[row]), int(positions[row])
        pages = torch.from_numpy(table.page_table[slot, : -(-length // tokens.shape[1])].astype(np.int64))
        token_ids = tokens[pages.to(tokens.device)].flatten()[:length].long().to(logits.device)
        counts = torch.bincount(token_ids[int(table.prompt_tokens[slot]) :], minlength=vocab).float()
        values, seen = logits[row], token_ids.unique()
        repetition = float(table.repetition_penalty[slot])
        values[seen] = torch.where(values[seen] > 0, values[seen] / repetition, values[seen] * repetition)
        values -= float(table.frequency_penalty[slot]) * counts
        values -= float(table.presence_penalty[slot]) * (counts > 0)
