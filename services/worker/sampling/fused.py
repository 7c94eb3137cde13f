"""Sampling on the GPU: launches only, in slices of rows, and nothing of the logits' size in float32.

The plain path is three launches a slice: the vocabulary head, ``summarise`` (one read of the logits) and ``pick``. Rows
with more settings take part in it and are drawn again, or are cut between the two. The same draws as ``sampler.py``.
"""

from collections.abc import Callable

import numpy as np
import torch

from services.worker.runner.slots import SlotTable
from services.worker.sampling.noise import NOISE_BLOCK
from services.worker.sampling.outcome import SampledOnDevice
from services.worker.sampling.rows import Adjusted, Asked, Biased, Penalised, Put, RowPreparer, SampleRows, Truncated
from services.worker.sampling.triton_adjust import add_bias, count_tokens, penalise
from services.worker.sampling.triton_blocks import blocks_per_program, summarise
from services.worker.sampling.triton_pick import look_up, pick
from services.worker.sampling.triton_truncation import find_lowest

# Logits of one slice, in elements: 512 MiB in bf16.
_SLICE_ELEMENTS = 256 * 1024 * 1024
# Rows whose logits are copied to float32 at a time: 31 MiB at a vocabulary of 128,256, and as much for the counts.
_CHUNK_ROWS = 64
_ENTRIES, _COLUMNS, _TOKENS = 256, 1024, 256  # of one program


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
    ) -> None:
        """``to_logits``: from hidden ``[n, hidden_size]`` to logits ``[n, vocab_size or more]``, bf16 or fp32.

        For penalties: ``tokens [page_count, page_size]`` int32 is the cache's, ``page_table [max_slots, max_pages]``
        int32 is on the device; both are read when the launches run.
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
                self._report(logits, chosen, part.asked, wanted)
            for adjusted in part.adjusted:
                self._redraw(logits, adjusted, chosen, wanted)
        return SampledOnDevice(token_ids, finite, wanted.logprobs, wanted.top_token_ids, wanted.top_logprobs)

    def _draw(
        self,
        logits: torch.Tensor,
        scales: torch.Tensor,
        keys: torch.Tensor,
        truncated: Truncated | None,
        token_ids: torch.Tensor,
        finite: torch.Tensor,
    ) -> None:
        """Write ``token_ids`` and ``finite`` of all rows of ``logits``."""
        count, stride = logits.shape[0], logits.stride(0)
        self._summarise(logits, count, scales=scales)
        if truncated is not None:
            cut = len(truncated.rows)
            bounds = torch.empty(cut, device=logits.device)
            self._lowest.fill_(-torch.inf)
            find_lowest[(cut,)](
                logits, truncated.rows, scales, truncated.top_k, truncated.top_p, truncated.log_min_p,
                self._peaks, self._sums, bounds, self._lowest, stride, self._vocab, self._blocks,
                WIDTH=self._width, SHIFT=16 if logits.dtype == torch.bfloat16 else 0, num_warps=4,
            )  # fmt: skip
            self._summarise(logits, cut, truncated.rows, scales=scales, lowest=bounds)
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
    ) -> None:
        peaks, sums = out or (self._peaks, self._sums)
        per_program = blocks_per_program(count, self._blocks)
        summarise[(count, -(-self._blocks // per_program))](
            logits, rows, scales, lowest, peaks, sums, logits.stride(0), self._vocab, self._blocks, per_program,
            MAPPED=rows is not None, TRUNCATED=lowest is not None, UNSCALED=scales is None, num_warps=1,
        )  # fmt: skip

    def _redraw(self, logits: torch.Tensor, adjusted: Adjusted, token_ids: torch.Tensor, wanted: "_Wanted") -> None:
        """Draw rows with bias or penalties from copies, over what was drawn for them without."""
        count, device = len(adjusted.rows), logits.device
        copies = self._copies[:count]
        copies.copy_(logits.index_select(0, adjusted.rows)[:, : self._vocab])
        if adjusted.biased is not None:
            self._bias(copies, adjusted.biased)
        if adjusted.penalised is not None:
            self._penalise(copies, adjusted.penalised)
        chosen = torch.empty(count, dtype=torch.int32, device=device)
        finite = torch.empty(count, dtype=torch.uint8, device=device)
        self._draw(copies, adjusted.scales, adjusted.keys, adjusted.truncated, chosen, finite)
        token_ids.index_copy_(0, adjusted.rows.long(), chosen)
        if adjusted.asked is not None:
            self._report(copies, chosen, adjusted.asked, wanted)

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

    def _report(self, logits: torch.Tensor, token_ids: torch.Tensor, asked: Asked, wanted: "_Wanted") -> None:
        """Log-probabilities of ``asked`` rows' tokens, and of the most likely ones."""
        count = len(asked.rows)
        peaks, sums = (torch.empty(count, self._blocks, device=logits.device) for _ in range(2))
        totals = torch.empty(count, device=logits.device)
        self._summarise(logits, count, asked.rows, out=(peaks, sums))
        look_up[(count,)](
            logits, asked.rows, token_ids, peaks, sums, wanted.next_logprobs(count), totals,
            logits.stride(0), self._blocks, WIDTH=self._width, num_warps=1,
        )  # fmt: skip
        for start in range(0, asked.with_top, self._chunk_rows):
            inside = slice(start, min(start + self._chunk_rows, asked.with_top))
            rows = logits.index_select(0, asked.rows[inside])[:, : self._vocab]
            best = rows.float().topk(wanted.widest, dim=-1)
            wanted.add_top(best.indices, best.values - totals[inside].unsqueeze(1))


class _Wanted:
    """The log-probabilities of a step, filled in the order of ``SampleRows.asked`` and ``top_rows``."""

    def __init__(self, rows: SampleRows, device: torch.device) -> None:
        self.widest = rows.widest
        self.logprobs = self.top_token_ids = self.top_logprobs = None
        self._asked = self._top = 0  # filled so far
        if len(rows.asked):
            self.logprobs = torch.empty(len(rows.asked), device=device)
        if self.widest:
            shape = (len(rows.top_rows), self.widest)
            self.top_token_ids = torch.empty(shape, dtype=torch.int32, device=device)
            self.top_logprobs = torch.empty(shape, device=device)

    def next_logprobs(self, count: int) -> torch.Tensor:
        self._asked += count
        return self.logprobs[self._asked - count : self._asked]

    def add_top(self, token_ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        inside = slice(self._top, self._top + len(token_ids))
        self.top_token_ids[inside] = token_ids
        self.top_logprobs[inside] = logprobs
        self._top = inside.stop
