"""Sampling on the GPU: launches only, in slices of rows, and nothing of the logits' size in float32.

The plain path is three launches a slice: the vocabulary head, ``summarise`` (one read of the logits) and ``pick``. Rows
with more settings take part in it and are drawn again, or are cut between the two. The same draws as ``sampler.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from services.worker.sampling.outcome import SampledOnDevice
from services.worker.sampling.prompt_logprobs import RowScores, score_rows
from services.worker.sampling.rows import (
    Adjusted,
    Asked,
    Biased,
    Forced,
    Masked,
    Penalised,
    Put,
    RowPreparer,
    SampleRows,
    Truncated,
)
from services.worker.sampling.triton_adjust import add_bias, count_tokens, penalise
from services.worker.sampling.triton_blocks import blocks_per_program, summarise
from services.worker.sampling.triton_force import find_forced, force
from services.worker.sampling.triton_mask import rule_out
from services.worker.sampling.triton_pick import look_up, pick
from services.worker.sampling.triton_truncation import distribute, find_lowest
from services.worker.step.noise import NOISE_BLOCK
from services.worker.step.slots import SlotTable

# Logits of one slice, in elements: 512 MiB in bf16.
_SLICE_ELEMENTS = 256 * 1024 * 1024
# Rows whose logits are copied to float32 at a time: 31 MiB at a vocabulary of 128,256, and as much for the counts.
_CHUNK_ROWS = 64
# Logits of a slice of prompt tokens that are scored, in elements: 64 MiB in float32.
_SCORED_ELEMENTS = 16 * 1024 * 1024
_ENTRIES, _COLUMNS, _TOKENS = 256, 1024, 256  # of one program

# Low bits that are zero in a float32 which was a number of this type.
EMPTY_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class FusedSampler:
    """Owned by the compute thread; ``run`` may be captured in a CUDA graph when ``SampleRows.plain``."""

    def __init__(
        self,
        to_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        device: torch.device,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        slice_elements: int = _SLICE_ELEMENTS,
        chunk_rows: int = _CHUNK_ROWS,
        mask_shape: tuple[int, int] | None = None,
    ) -> None:
        """``to_logits``: from hidden ``[n, hidden_size]`` to logits ``[n, vocab_size or more]``, bf16 or fp32.

        For penalties: ``tokens [page_count, page_size]`` int32 is the cache's, ``page_table [max_slots, max_pages]``
        int32 is on the device; both are read when the launches run. For grammars: ``mask_shape``, the most rows of a
        step that have one, and the words of a mask; None = no row has.
        """
        self._to_logits, self._vocab = to_logits, vocab_size
        self._tokens, self._page_table = tokens, page_table
        self._blocks = -(-vocab_size // NOISE_BLOCK)
        self._width = 1 << (self._blocks - 1).bit_length()
        # A multiple of 16, so that what is cut by slices stays aligned: kernels are compiled for that.
        slice_rows = max(16, slice_elements // vocab_size // 16 * 16)
        self._preparer = RowPreparer(slice_rows, chunk_rows)
        shape = (max(slice_rows, chunk_rows), self._blocks)
        self._peaks, self._sums = (torch.empty(shape, device=device) for _ in range(2))
        self._lowest = torch.empty(shape[0], device=device)
        self._copies = torch.empty(chunk_rows, vocab_size, device=device)
        self._counts = torch.empty(chunk_rows, vocab_size, dtype=torch.int32, device=device)
        self._chunk_rows = chunk_rows
        if mask_shape is not None:
            # The step's masks: filled on the host before ``run`` is called, and read when its launches run.
            self.masks = torch.empty(mask_shape, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._bits = torch.empty(chunk_rows, mask_shape[1], dtype=torch.int32, device=device)

    def prepare(
        self, table: SlotTable, slots: np.ndarray, positions: np.ndarray, put: Put, padded: int | None = None
    ) -> SampleRows:
        """The host's part, for ``slots [rows]`` whose sampled tokens take the places ``positions [rows]``.

        ``put(array)`` returns a view on the device, 16-byte aligned, that holds the array once the step's upload has
        been issued. It is called for the scales and the keys first, in sizes that depend on ``padded`` alone (rows to
        sample, those that do not count included; None = as many as there are), and for nothing else on the plain path.
        """
        return self._preparer.prepare(table, slots, positions, put, len(slots) if padded is None else padded)

    def run(self, hidden: torch.Tensor, rows: SampleRows) -> SampledOnDevice:
        """Launch everything for ``hidden [n, hidden_size]``, whose first rows are ``rows``."""
        device, count = hidden.device, rows.scales.shape[0]
        token_ids = torch.empty(count, dtype=torch.int32, device=device)
        finite = torch.empty(count, dtype=torch.uint8, device=device)
        wanted = _Wanted(rows, device)
        for part in rows.slices:
            inside = slice(part.start, part.stop)
            logits = self._to_logits(hidden[inside])
            chosen = token_ids[inside]
            self._draw(logits, rows.scales[inside], rows.keys[inside], part.truncated, chosen, finite[inside])
            if part.asked is not None:
                self._report(logits, chosen, part.asked, self._weigh(logits, part.asked, wanted), wanted)
            for adjusted in part.adjusted:
                self._redraw(logits, adjusted, chosen, finite[inside], wanted)
        return SampledOnDevice(token_ids, finite, wanted.logprobs, wanted.top_token_ids, wanted.top_logprobs)

    def score(self, hidden: torch.Tensor, token_ids: torch.Tensor, top: int) -> RowScores:
        """Launch the log-probabilities of ``token_ids [n]`` int64, n > 0, behind the first n rows of ``hidden``, and of
        the ``top`` most likely tokens there."""
        rows = max(16, _SCORED_ELEMENTS // self._vocab // 16 * 16)
        return score_rows(hidden[: len(token_ids)], self._to_logits, token_ids, top, self._vocab, rows)

    def _draw(
        self,
        logits: torch.Tensor,
        scales: torch.Tensor,
        keys: torch.Tensor,
        truncated: Truncated | None,
        token_ids: torch.Tensor,
        finite: torch.Tensor,
        masked: bool = False,
    ) -> None:
        """Write ``token_ids`` and ``finite`` of all rows of ``logits``; ``masked``: some are minus infinity since they
        cannot be drawn."""
        count, stride = logits.shape[0], logits.stride(0)
        self._summarise(logits, count, scales=scales, masked=masked)
        if truncated is not None:
            cut = len(truncated.rows)
            bounds = torch.empty(cut, device=logits.device)
            self._lowest.fill_(-torch.inf)
            find_lowest[(cut,)](
                logits, truncated.rows, scales, truncated.top_k, truncated.top_p, truncated.log_min_p,
                self._peaks, self._sums, bounds, self._lowest, stride, self._vocab, self._blocks,
                WIDTH=self._width, SHIFT=EMPTY_BITS[logits.dtype], num_warps=4,
            )  # fmt: skip
            self._summarise(logits, cut, truncated.rows, scales=scales, lowest=bounds, masked=masked)
        pick[(count,)](
            logits, scales, keys, self._lowest, self._peaks, self._sums, token_ids, finite,
            stride, self._vocab, self._blocks, TRUNCATED=truncated is not None, WIDTH=self._width, num_warps=4,
        )  # fmt: skip

    def _summarise(
        self,
        logits: torch.Tensor,
        count: int,
        rows: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        lowest: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        masked: bool = False,
    ) -> None:
        peaks, sums = out or (self._peaks, self._sums)
        per_program = blocks_per_program(count, self._blocks)
        summarise[(count, -(-self._blocks // per_program))](
            logits, rows, scales, lowest, peaks, sums, logits.stride(0), self._vocab, self._blocks, per_program,
            MAPPED=rows is not None, TRUNCATED=lowest is not None, UNSCALED=scales is None, MASKED=masked,
            num_warps=1,
        )  # fmt: skip

    def _redraw(
        self,
        logits: torch.Tensor,
        adjusted: Adjusted,
        token_ids: torch.Tensor,
        finite: torch.Tensor,
        wanted: "_Wanted",
    ) -> None:
        """Draw the rows of ``adjusted`` from copies, and overwrite the tokens that were drawn for them before."""
        count, device = len(adjusted.rows), logits.device
        copies = self._copies[:count]
        copies.copy_(logits.index_select(0, adjusted.rows)[:, : self._vocab])
        if adjusted.biased is not None:
            self._bias(copies, adjusted.biased)
        if adjusted.penalised is not None:
            self._penalise(copies, adjusted.penalised)
        weights = None if adjusted.asked is None else self._weigh(copies, adjusted.asked, wanted)
        chosen = torch.empty(count, dtype=torch.int32, device=device)
        still_finite = torch.empty(count, dtype=torch.uint8, device=device)
        if adjusted.masked is not None:
            self._rule_out(copies, adjusted.masked)
        if adjusted.forced is not None:
            self._force(copies, adjusted.forced)
        masked = adjusted.masked is not None or adjusted.forced is not None
        self._draw(copies, adjusted.scales, adjusted.keys, adjusted.truncated, chosen, still_finite, masked)
        if masked:  # a logit that is not finite may be ruled out
            chosen.mul_(finite.index_select(0, adjusted.rows))
        token_ids.index_copy_(0, adjusted.rows.long(), chosen)
        if adjusted.asked is not None and weights is not None:
            self._report(copies, chosen, adjusted.asked, weights, wanted)
        if adjusted.processed is not None:
            self._distribute(copies, adjusted, adjusted.processed)
            weights = self._weigh(copies, adjusted.processed, wanted, masked=True)
            self._report(copies, chosen, adjusted.processed, weights, wanted)

    def _bias(self, copies: torch.Tensor, biased: Biased) -> None:
        entries = len(biased.rows)
        add_bias[(-(-entries // _ENTRIES),)](
            copies, biased.rows, biased.token_ids, biased.values, entries, self._vocab, BLOCK=_ENTRIES
        )

    def _penalise(self, copies: torch.Tensor, penalised: Penalised) -> None:
        count = copies.shape[0]
        counts = self._counts[:count]
        counts.zero_()
        count_tokens[(count, 8)](
            counts, penalised.slots, penalised.lengths, penalised.prompts, self._tokens, self._page_table,
            self._page_table.shape[1], self._tokens.shape[1], self._vocab, BLOCK=_TOKENS,
        )  # fmt: skip
        penalise[(count, -(-self._vocab // _COLUMNS))](
            copies, counts, penalised.repetition, penalised.frequency, penalised.presence, self._vocab, BLOCK=_COLUMNS
        )

    def _rule_out(self, copies: torch.Tensor, masked: Masked) -> None:
        count, words = len(masked.rows), self._bits.shape[1]
        self._bits[:count].copy_(self.masks[masked.start : masked.start + count], non_blocking=True)
        rule_out[(count, -(-self._vocab // _COLUMNS))](
            copies, masked.rows, self._bits, words, self._vocab, BLOCK=_COLUMNS
        )

    def _force(self, copies: torch.Tensor, forced: Forced) -> None:
        """Rule out every token but the one that ends the reasoning section, where the budget is used up."""
        count = len(forced.rows)
        chosen = torch.empty(count, dtype=torch.int32, device=copies.device)
        find_forced[(count,)](
            copies, forced.rows, forced.slots, forced.lengths, forced.prompts, forced.budgets, forced.begins,
            forced.ends, chosen, self._tokens, self._page_table, self._page_table.shape[1], self._tokens.shape[1],
            self._vocab, BLOCK=_TOKENS,
        )  # fmt: skip
        force[(count, -(-self._vocab // _COLUMNS))](copies, forced.rows, chosen, self._vocab, BLOCK=_COLUMNS)

    def _distribute(self, copies: torch.Tensor, adjusted: Adjusted, asked: Asked) -> None:
        """Turn the copies of ``asked`` rows into the logits whose softmax they were drawn from by ``_draw``."""
        distribute[(len(asked.rows), -(-self._vocab // _COLUMNS))](
            copies, asked.rows, adjusted.scales, self._lowest, self._vocab,
            TRUNCATED=adjusted.truncated is not None, BLOCK=_COLUMNS,
        )  # fmt: skip

    def _weigh(self, logits: torch.Tensor, asked: Asked, wanted: "_Wanted", masked: bool = False) -> "_Weights":
        """Launch what the log-probabilities of ``asked`` rows need of all tokens. ``masked``: as of ``_draw``."""
        count = len(asked.rows)
        peaks, sums = (torch.empty(count, self._blocks, device=logits.device) for _ in range(2))
        weights = _Weights(peaks, sums, [])
        self._summarise(logits, count, asked.rows, out=(weights.peaks, weights.sums), masked=masked)
        for start in range(0, asked.with_top, self._chunk_rows):
            inside = slice(start, min(start + self._chunk_rows, asked.with_top))
            rows = logits.index_select(0, asked.rows[inside])[:, : self._vocab]
            weights.best.append((inside, *rows.float().topk(wanted.widest, dim=-1)))
        return weights

    def _report(
        self, logits: torch.Tensor, token_ids: torch.Tensor, asked: Asked, weights: "_Weights", wanted: "_Wanted"
    ) -> None:
        """Log-probabilities of ``asked`` rows' tokens, and of the most likely ones."""
        count = len(asked.rows)
        totals = torch.empty(count, device=logits.device)
        look_up[(count,)](
            logits, asked.rows, token_ids, weights.peaks, weights.sums, wanted.next_logprobs(count), totals,
            logits.stride(0), self._blocks, WIDTH=self._width, num_warps=1,
        )  # fmt: skip
        for inside, values, best in weights.best:
            wanted.add_top(best, values - totals[inside].unsqueeze(1))


class _Weights(NamedTuple):
    """Of the rows of an ``Asked``."""

    peaks: torch.Tensor  # [n, blocks] float32, as ``summarise`` leaves them
    sums: torch.Tensor  # beside peaks
    best: list[tuple[slice, torch.Tensor, torch.Tensor]]  # rows; their largest logits, and of which tokens


class _Wanted:
    """The log-probabilities of a step, filled in the order of ``SampleRows.asked`` and ``top_rows``."""

    def __init__(self, rows: SampleRows, device: torch.device) -> None:
        self.widest = rows.widest
        self.logprobs: torch.Tensor | None = None
        self.top_token_ids: torch.Tensor | None = None
        self.top_logprobs: torch.Tensor | None = None
        self._asked = self._top = 0  # filled so far
        if len(rows.asked):
            self.logprobs = torch.empty(len(rows.asked), device=device)
        if self.widest:
            shape = (len(rows.top_rows), self.widest)
            self.top_token_ids = torch.empty(shape, dtype=torch.int32, device=device)
            self.top_logprobs = torch.empty(shape, device=device)

    def next_logprobs(self, count: int) -> torch.Tensor:
        self._asked += count
        return self.logprobs[self._asked - count : self._asked]  # type: ignore[index]  # who asked is counted there

    def add_top(self, token_ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        inside = slice(self._top, self._top + len(token_ids))
        self.top_token_ids[inside] = token_ids  # type: ignore[index]  # as above
        self.top_logprobs[inside] = logprobs  # type: ignore[index]
        self._top = inside.stop
