"""Inputs of the GPU sampler for the rows of a step, prepared on the host and uploaded."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.step.noise import row_keys, scales_of
from services.worker.step.slots import SlotTable

# Queues an int32, float32 or uint8 array for the step's upload and returns the view on the device that will hold it.
Put = Callable[[np.ndarray], torch.Tensor]


@dataclass(frozen=True)
class Truncated:
    """Rows with a temperature and top-k, top-p or min-p."""

    rows: torch.Tensor  # [n] int32, rows of the slice or chunk
    top_k: torch.Tensor  # [n] int32, 0 = off
    top_p: torch.Tensor  # [n] float32, 1 = off
    log_min_p: torch.Tensor  # [n] float32, minus infinity = off


@dataclass(frozen=True)
class LogprobRows:
    """Rows whose requests ask for log-probabilities."""

    rows: torch.Tensor  # [n] int32, rows of the slice or chunk; those with top logprobs first
    with_top: int  # number of rows with top logprobs


@dataclass(frozen=True)
class Penalised:
    """Penalties of all rows of a chunk."""

    slots: torch.Tensor  # [n] int32
    lengths: torch.Tensor  # [n] int32, tokens of the sequence; 0 = the row has no penalties
    prompts: torch.Tensor  # [n] int32, tokens of the prompt
    penalties: torch.Tensor  # [n, 3] float32, as in SlotTable


@dataclass(frozen=True)
class Biased:
    """All biases of a chunk, one entry per bias."""

    rows: torch.Tensor  # [entries] int32, rows of the chunk
    token_ids: torch.Tensor  # [entries] int32
    values: torch.Tensor  # [entries] float32


@dataclass(frozen=True)
class Masked:
    """Rows of a chunk with a grammar."""

    rows: torch.Tensor  # [n] int32, rows of the chunk
    start: int  # index of the first row's mask among the masks of the step; the others follow


@dataclass(frozen=True)
class Forced:
    """Rows of a chunk whose thinking budget may be used up."""

    rows: torch.Tensor  # [n] int32, rows of the chunk
    slots: torch.Tensor  # [n] int32
    lengths: torch.Tensor  # [n] int32, tokens of the sequence
    prompts: torch.Tensor  # [n] int32, tokens of the prompt
    budgets: torch.Tensor  # [n] int32, tokens
    begins: torch.Tensor  # [n] int32, token that begins the section; -1 = the section begins after the prompt
    ends: torch.Tensor  # [n] int32, token that ends the section


@dataclass(frozen=True)
class Adjusted:
    """A chunk of rows that are drawn from float32 copies of their logits.

    These are rows with bias, penalties, a grammar, a forced token or processed log-probabilities.
    """

    rows: torch.Tensor  # [n] int32, rows of the slice
    scales: torch.Tensor  # [n] float32
    keys: torch.Tensor  # [n, 2] int32
    biased: Biased | None
    penalised: Penalised | None
    masked: Masked | None
    forced: Forced | None
    truncated: Truncated | None
    raw_logprobs: LogprobRows | None
    processed_logprobs: LogprobRows | None


@dataclass(frozen=True)
class RowSlice:
    """Rows whose logits are computed together. The plain path has None or () in all fields but ``start``, ``stop``."""

    start: int
    stop: int
    truncated: Truncated | None = None  # without adjusted rows
    raw_logprobs: LogprobRows | None = None  # without adjusted rows
    adjusted: tuple[Adjusted, ...] = ()


@dataclass(frozen=True)
class SampleRows:
    """Rows of a step in batch order, padded with greedy rows whose results are ignored."""

    slots: np.ndarray  # [rows] int64
    scales: torch.Tensor  # [padded] float32, one over the temperature; 0 = greedy
    keys: torch.Tensor  # [padded, 2] int32, select the noise
    slices: tuple[RowSlice, ...]
    logprob_rows: np.ndarray  # [n] int64, rows with logprobs, in the order of SampledOnDevice
    top_rows: np.ndarray  # [m] int64, rows with top logprobs, in the order of SampledOnDevice
    top_counts: np.ndarray  # [m] int64, requested number of top logprobs
    masked: np.ndarray  # [k] int64, rows with a grammar, in the order of the step's masks

    @property
    def plain(self) -> bool:
        """True if the launches depend on the padded size only, so that a CUDA graph may contain them."""
        return all(not (part.truncated or part.raw_logprobs or part.adjusted) for part in self.slices)

    @property
    def widest(self) -> int:
        """Largest requested number of top logprobs."""
        return int(self.top_counts.max(initial=0))


class RowPreparer:
    """Prepares ``SampleRows`` in slices of ``slice_rows`` rows, with adjusted rows in chunks of ``chunk_rows``."""

    def __init__(self, slice_rows: int, chunk_rows: int) -> None:
        self._slice_rows, self._chunk_rows = slice_rows, chunk_rows

    def prepare(self, table: SlotTable, slots: np.ndarray, positions: np.ndarray, put: Put, padded: int) -> SampleRows:
        """Return the rows of ``slots [rows]`` at ``positions [rows]``, see ``FusedSampler.prepare``."""
        count = len(slots)
        scales, keys = np.zeros(padded, np.float32), np.zeros((padded, 2), np.int32)
        scales[:count] = scales_of(table.temperature[slots])
        keys[:count] = row_keys(table.seed[slots], table.sample_index[slots], positions)
        step = _SlicePreparer(table, slots, positions, scales, keys, put, self._chunk_rows)
        uploaded = put(scales), put(keys)
        starts = range(0, padded, self._slice_rows)
        slices = tuple(step.slice(start, min(start + self._slice_rows, padded)) for start in starts)
        parts = (step.logprob_rows, step.top_rows, step.masked)
        logprob_rows, top, masked = (np.concatenate([np.empty(0, np.int64), *rows]) for rows in parts)
        return SampleRows(slots, *uploaded, slices, logprob_rows, top, table.top_logprobs[slots[top]], masked)


class _SlicePreparer:
    """Prepares the slices of one step in order, and collects the rows whose results or masks have an order."""

    def __init__(
        self,
        table: SlotTable,
        slots: np.ndarray,
        positions: np.ndarray,
        scales: np.ndarray,
        keys: np.ndarray,
        put: Put,
        chunk_rows: int,
    ) -> None:
        self._table, self._slots, self._positions = table, slots, positions
        self._scales, self._keys, self._put, self._chunk_rows = scales, keys, put, chunk_rows
        limited = (table.top_k[slots] > 0) | (table.top_p[slots] < 1) | (table.min_p[slots] > 0)
        self._limited = limited & (table.temperature[slots] > 0)
        self._raw = table.logprobs[slots] & ~table.processed[slots]
        self._processed = table.logprobs[slots] & table.processed[slots]
        self._forced = table.may_force(slots, positions)
        self._adjusted = table.biased[slots] | table.penalised[slots] | table.masked[slots]
        self._adjusted |= self._processed | self._forced
        self._plain = not (self._limited.any() or self._adjusted.any() or self._raw.any())
        self.logprob_rows: list[np.ndarray] = []
        self.top_rows: list[np.ndarray] = []
        self.masked: list[np.ndarray] = []

    def slice(self, start: int, stop: int) -> RowSlice:
        """Prepare rows ``start`` to ``stop`` of the step."""
        if self._plain:
            return RowSlice(start, stop)
        rows = np.arange(start, min(stop, len(self._slots)))
        adjusted, rest = rows[self._adjusted[rows]], rows[~self._adjusted[rows]]
        truncated, raw = self._truncated(rest, rest - start), self._logprobs(rest, rest - start, self._raw)
        chunks = [adjusted[at : at + self._chunk_rows] for at in range(0, len(adjusted), self._chunk_rows)]
        return RowSlice(start, stop, truncated, raw, tuple(self._adjust(chunk, chunk - start) for chunk in chunks))

    def _truncated(self, rows: np.ndarray, indices: np.ndarray) -> Truncated | None:
        """Return the truncated ones of ``rows``, which have ``indices`` in their slice or chunk."""
        limited = self._limited[rows]
        if not limited.any():
            return None
        slots = self._slots[rows[limited]]
        with np.errstate(divide="ignore"):
            log_min_p = np.log(self._table.min_p[slots])
        top_k = np.minimum(self._table.top_k[slots], np.iinfo(np.int32).max)
        return Truncated(
            self._integers(indices[limited]),
            self._integers(top_k),
            self._put(self._table.top_p[slots]),
            self._put(log_min_p),
        )

    def _logprobs(self, rows: np.ndarray, indices: np.ndarray, selected: np.ndarray) -> LogprobRows | None:
        """Return those of ``rows``, which have ``indices``, for which ``selected [all rows]`` is true."""
        inside = selected[rows]
        if not inside.any():
            return None
        rows, indices = rows[inside], indices[inside]
        top = self._table.top_logprobs[self._slots[rows]] > 0
        order = np.argsort(~top, kind="stable")
        self.logprob_rows.append(rows[order])
        self.top_rows.append(rows[top])
        return LogprobRows(self._integers(indices[order]), int(top.sum()))

    def _adjust(self, rows: np.ndarray, indices: np.ndarray) -> Adjusted:
        within = np.arange(len(rows))
        return Adjusted(
            rows=self._integers(indices),
            scales=self._put(self._scales[rows]),
            keys=self._put(self._keys[rows]),
            biased=self._biased(rows),
            penalised=self._penalised(rows),
            masked=self._masked(rows),
            forced=self._may_force(rows),
            truncated=self._truncated(rows, within),
            # This order is the one in which the sampler writes log-probabilities.
            raw_logprobs=self._logprobs(rows, within, self._raw),
            processed_logprobs=self._logprobs(rows, within, self._processed),
        )

    def _biased(self, rows: np.ndarray) -> Biased | None:
        table, slots = self._table, self._slots[rows]
        within = np.flatnonzero(table.biased[slots])
        if len(within) == 0:
            return None
        token_ids, values = zip(*(table.biases[slot] for slot in slots[within].tolist()), strict=True)
        repeated = np.repeat(within, [len(ids) for ids in token_ids])
        return Biased(
            self._integers(repeated),
            self._integers(np.concatenate(token_ids)),
            self._put(np.concatenate(values).astype(np.float32)),
        )

    def _penalised(self, rows: np.ndarray) -> Penalised | None:
        table, slots = self._table, self._slots[rows]
        on = table.penalised[slots]
        if not on.any():
            return None
        return Penalised(
            slots=self._integers(slots),
            lengths=self._integers(np.where(on, self._positions[rows], 0)),
            prompts=self._integers(table.prompt_tokens[slots]),
            penalties=self._put(table.penalties[slots]),
        )

    def _masked(self, rows: np.ndarray) -> Masked | None:
        within = np.flatnonzero(self._table.masked[self._slots[rows]])
        if len(within) == 0:
            return None
        start = sum(map(len, self.masked))
        self.masked.append(rows[within])
        return Masked(self._integers(within), start)

    def _may_force(self, rows: np.ndarray) -> Forced | None:
        within = np.flatnonzero(self._forced[rows])
        if len(within) == 0:
            return None
        table, slots = self._table, self._slots[rows[within]]
        columns = (slots, self._positions[rows[within]], table.prompt_tokens[slots], table.think_tokens[slots])
        return Forced(*map(self._integers, (within, *columns, table.think_begin[slots], table.think_end[slots])))

    def _integers(self, values: np.ndarray) -> torch.Tensor:
        return self._put(values.astype(np.int32))
