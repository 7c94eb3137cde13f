"""Sampling on the GPU with Triton kernels, in slices of rows, without float32 copies of all logits.

The plain path has three launches per slice: the vocabulary head, ``summarise``, which reads the logits once, and
``pick``. Truncated rows have their summaries corrected between the two. Rows with other settings also take part, and
their tokens are then replaced by a second draw. The draws are those of ``sampler.py``.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from services.worker.sampling.outcome import SampledOnDevice
from services.worker.sampling.prompt_logprobs import RowScores, score_rows
from services.worker.sampling.rows import (
    Adjusted,
    Biased,
    Forced,
    LogprobRows,
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
# Rows whose logits are copied to float32 at a time: 31 MiB for a vocabulary of 128,256, and the same for counts.
_CHUNK_ROWS = 64
# Logits of a slice of scored prompt tokens, in elements: 64 MiB in float32.
_SCORED_ELEMENTS = 16 * 1024 * 1024
_ENTRIES, _COLUMNS, _TOKENS = 256, 1024, 256  # elements per program

# Number of low bits that are zero in a float32 converted from this type.
EMPTY_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class FusedSampler:
    """Sampler of the compute thread. ``run`` may be captured in a CUDA graph if ``SampleRows.plain`` is true."""

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
        total: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> None:
        """Allocate the buffers.

        ``to_logits`` maps hidden ``[n, hidden_size]`` to logits ``[n, vocab_size or more]`` in bf16, fp16 or fp32.
        ``tokens [page_count, page_size]`` int32 are the token ids of the cache, and ``page_table [max_slots,
        max_pages]`` int32 is on the device. Kernels for penalties and thinking budgets read both. ``mask_shape`` is
        the maximum number of rows with a grammar in a step, and the words of a mask; None disables grammars. ``total``
        returns the sum over the ranks of the stage, as ``Exchange.total`` does.
        """
        self._to_logits, self._vocab, self._total = to_logits, vocab_size, total
        self._tokens, self._page_table = tokens, page_table
        self._blocks = -(-vocab_size // NOISE_BLOCK)
        self._width = 1 << (self._blocks - 1).bit_length()
        # A multiple of 16 keeps slices of arrays aligned. The kernels are compiled for aligned pointers.
        slice_rows = max(16, slice_elements // vocab_size // 16 * 16)
        self._preparer = RowPreparer(slice_rows, chunk_rows)
        shape = (max(slice_rows, chunk_rows), self._blocks)
        self._peaks, self._sums = (torch.empty(shape, device=device) for _ in range(2))
        self._lowest = torch.empty(shape[0], device=device)
        self._copies = torch.empty(chunk_rows, vocab_size, device=device)
        self._counts = torch.empty(chunk_rows, vocab_size, dtype=torch.int32, device=device)
        self._chunk_rows = chunk_rows
        if mask_shape is not None:
            # Grammar masks of a step. The host of the reporting rank fills them before ``run``; the launches of ``run``
            # read them. On other ranks they stay zero, so the sum over the ranks equals those of the reporting rank.
            self.masks = torch.zeros(mask_shape, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._bits = torch.empty(chunk_rows, mask_shape[1], dtype=torch.int32, device=device)

    def prepare(
        self, table: SlotTable, slots: np.ndarray, positions: np.ndarray, put: Put, padded: int | None = None
    ) -> SampleRows:
        """Prepare on the host to sample tokens of ``slots [rows]`` at ``positions [rows]`` of their sequences.

        ``padded`` is the number of rows including padding; None means no padding. ``put(array)`` returns a view on
        the device, 16-byte aligned, that holds the array after the step's upload. It is called first for scales and
        keys, whose sizes depend on ``padded`` only. The plain path calls it for no other array.
        """
        return self._preparer.prepare(table, slots, positions, put, len(slots) if padded is None else padded)

    def run(self, hidden: torch.Tensor, rows: SampleRows) -> SampledOnDevice:
        """Launch the sampling of ``rows``, which are the first rows of ``hidden [n, hidden_size]``."""
        device, count = hidden.device, rows.scales.shape[0]
        token_ids = torch.empty(count, dtype=torch.int32, device=device)
        finite = torch.empty(count, dtype=torch.uint8, device=device)
        out = _LogprobBuffers(rows, device)
        for part in rows.slices:
            inside = slice(part.start, part.stop)
            logits = self._to_logits(hidden[inside])
            chosen = token_ids[inside]
            self._draw(logits, rows.scales[inside], rows.keys[inside], part.truncated, chosen, finite[inside])
            if part.raw_logprobs is not None:
                statistics = self._collect(logits, part.raw_logprobs, rows.widest)
                self._report(logits, chosen, part.raw_logprobs, statistics, out)
            for adjusted in part.adjusted:
                self._redraw(logits, adjusted, chosen, finite[inside], out)
        return SampledOnDevice(token_ids, finite, out.logprobs, out.top_token_ids, out.top_logprobs)

    def score(self, hidden: torch.Tensor, token_ids: torch.Tensor, top: int) -> RowScores:
        """Launch the scoring of ``token_ids [n]`` int64, n > 0, which follow the first n rows of ``hidden``.

        The result has their log-probabilities and those of the ``top`` most likely tokens.
        """
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
        """Write ``token_ids`` and ``finite`` of all rows of ``logits``.

        With ``masked``, a logit of -inf is a token that cannot be drawn. Otherwise its row is not finite.
        """
        count, stride = logits.shape[0], logits.stride(0)
        self._summarise(logits, count, scales=scales, masked=masked)
        if truncated is not None:
            count_truncated = len(truncated.rows)
            bounds = torch.empty(count_truncated, device=logits.device)
            self._lowest.fill_(-torch.inf)
            find_lowest[(count_truncated,)](
                logits, truncated.rows, scales, truncated.top_k, truncated.top_p, truncated.log_min_p,
                self._peaks, self._sums, bounds, self._lowest, stride, self._vocab, self._blocks,
                WIDTH=self._width, SHIFT=EMPTY_BITS[logits.dtype], num_warps=4,
            )  # fmt: skip
            self._summarise(logits, count_truncated, truncated.rows, scales=scales, lowest=bounds, masked=masked)
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
        out: "_LogprobBuffers",
    ) -> None:
        """Draw the rows of ``adjusted`` from float32 copies, and overwrite their earlier tokens."""
        count, device = len(adjusted.rows), logits.device
        copies = self._copies[:count]
        copies.copy_(logits.index_select(0, adjusted.rows)[:, : self._vocab])
        if adjusted.biased is not None:
            self._bias(copies, adjusted.biased)
        if adjusted.penalised is not None:
            self._penalise(copies, adjusted.penalised)
        raw = None if adjusted.raw_logprobs is None else self._collect(copies, adjusted.raw_logprobs, out.widest)
        chosen = torch.empty(count, dtype=torch.int32, device=device)
        still_finite = torch.empty(count, dtype=torch.uint8, device=device)
        if adjusted.masked is not None:
            self._mask(copies, adjusted.masked)
        if adjusted.forced is not None:
            self._force(copies, adjusted.forced)
        masked = adjusted.masked is not None or adjusted.forced is not None
        self._draw(copies, adjusted.scales, adjusted.keys, adjusted.truncated, chosen, still_finite, masked)
        if masked:  # a mask may hide a logit that is not finite; the token of such a row is 0
            chosen.mul_(finite.index_select(0, adjusted.rows))
        token_ids.index_copy_(0, adjusted.rows.long(), chosen)
        if adjusted.raw_logprobs is not None and raw is not None:
            self._report(copies, chosen, adjusted.raw_logprobs, raw, out)
        if adjusted.processed_logprobs is not None:
            self._distribute(copies, adjusted, adjusted.processed_logprobs)
            processed = self._collect(copies, adjusted.processed_logprobs, out.widest, masked=True)
            self._report(copies, chosen, adjusted.processed_logprobs, processed, out)

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
        penalise[(count, -(-self._vocab // _COLUMNS))](copies, counts, penalised.penalties, self._vocab, BLOCK=_COLUMNS)

    def _mask(self, copies: torch.Tensor, masked: Masked) -> None:
        count, words = len(masked.rows), self._bits.shape[1]
        bits = self._bits[:count].copy_(self.masks[masked.start : masked.start + count], non_blocking=True)
        rule_out[(count, -(-self._vocab // _COLUMNS))](
            copies, masked.rows, self._total(bits), words, self._vocab, BLOCK=_COLUMNS
        )

    def _force(self, copies: torch.Tensor, forced: Forced) -> None:
        """Force the token that ends the reasoning section in rows whose budget is used up."""
        count = len(forced.rows)
        chosen = torch.empty(count, dtype=torch.int32, device=copies.device)
        find_forced[(count,)](
            copies, forced.rows, forced.slots, forced.lengths, forced.prompts, forced.budgets, forced.begins,
            forced.ends, chosen, self._tokens, self._page_table, self._page_table.shape[1], self._tokens.shape[1],
            self._vocab, BLOCK=_TOKENS,
        )  # fmt: skip
        force[(count, -(-self._vocab // _COLUMNS))](copies, forced.rows, chosen, self._vocab, BLOCK=_COLUMNS)

    def _distribute(self, copies: torch.Tensor, adjusted: Adjusted, wanted: LogprobRows) -> None:
        """Turn the copies of ``wanted`` rows into logits whose softmax is the distribution that ``_draw`` used."""
        distribute[(len(wanted.rows), -(-self._vocab // _COLUMNS))](
            copies, wanted.rows, adjusted.scales, self._lowest, self._vocab,
            TRUNCATED=adjusted.truncated is not None, BLOCK=_COLUMNS,
        )  # fmt: skip

    def _collect(self, logits: torch.Tensor, wanted: LogprobRows, widest: int, masked: bool = False) -> "_Statistics":
        """Launch the block summaries of ``wanted`` rows and their ``widest`` largest logits.

        ``masked`` is as in ``_draw``.
        """
        count = len(wanted.rows)
        peaks, sums = (torch.empty(count, self._blocks, device=logits.device) for _ in range(2))
        self._summarise(logits, count, wanted.rows, out=(peaks, sums), masked=masked)
        best = []
        for start in range(0, wanted.with_top, self._chunk_rows):
            inside = slice(start, min(start + self._chunk_rows, wanted.with_top))
            rows = logits.index_select(0, wanted.rows[inside])[:, : self._vocab]
            best.append((inside, *rows.float().topk(widest, dim=-1)))
        return _Statistics(peaks, sums, best)

    def _report(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        wanted: LogprobRows,
        statistics: "_Statistics",
        out: "_LogprobBuffers",
    ) -> None:
        """Write the log-probabilities of ``wanted`` rows' tokens and of the most likely tokens to ``out``."""
        count = len(wanted.rows)
        totals = torch.empty(count, device=logits.device)
        look_up[(count,)](
            logits, wanted.rows, token_ids, statistics.peaks, statistics.sums, out.next_logprobs(count), totals,
            logits.stride(0), self._blocks, WIDTH=self._width, num_warps=1,
        )  # fmt: skip
        for inside, values, best in statistics.best:
            out.add_top(best, values - totals[inside].unsqueeze(1))


class _Statistics(NamedTuple):
    """Statistics of the logits of ``LogprobRows``."""

    peaks: torch.Tensor  # [n, blocks] float32, from ``summarise``
    sums: torch.Tensor  # [n, blocks] float32, from ``summarise``
    best: list[tuple[slice, torch.Tensor, torch.Tensor]]  # rows, their largest logits, and the tokens of these


class _LogprobBuffers:
    """Log-probabilities of a step, filled in the order of ``SampleRows.logprob_rows`` and ``top_rows``."""

    def __init__(self, rows: SampleRows, device: torch.device) -> None:
        self.widest = rows.widest
        self.logprobs: torch.Tensor | None = None
        self.top_token_ids: torch.Tensor | None = None
        self.top_logprobs: torch.Tensor | None = None
        self._filled = self._top_filled = 0
        if len(rows.logprob_rows):
            self.logprobs = torch.empty(len(rows.logprob_rows), device=device)
        if self.widest:
            shape = (len(rows.top_rows), self.widest)
            self.top_token_ids = torch.empty(shape, dtype=torch.int32, device=device)
            self.top_logprobs = torch.empty(shape, device=device)

    def next_logprobs(self, count: int) -> torch.Tensor:
        """Return the view for the next ``count`` rows."""
        self._filled += count
        return self.logprobs[self._filled - count : self._filled]  # type: ignore[index]  # None only without such rows

    def add_top(self, token_ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append the most likely tokens of the next rows, ``[n, widest]``, and their log-probabilities."""
        inside = slice(self._top_filled, self._top_filled + len(token_ids))
        self.top_token_ids[inside] = token_ids  # type: ignore[index]  # as above
        self.top_logprobs[inside] = logprobs  # type: ignore[index]
        self._top_filled = inside.stop
