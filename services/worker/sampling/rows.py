"""What a step's sampling needs to know of its rows: chosen on the host, uploaded, and kept to read the outcome."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.step.noise import row_keys, scales_of
from services.worker.step.slots import SlotTable

# From an array (int32, float32 or uint8) to a view on the device that holds it once the step's upload has been issued.
Put = Callable[[np.ndarray], torch.Tensor]


@dataclass(frozen=True)
class Truncated:
    """Rows with top-k, top-p or min-p, and a temperature."""

    rows: torch.Tensor  # [n] int32, of the logits at hand
    top_k: torch.Tensor  # [n] int32, 0 = off
    top_p: torch.Tensor  # [n] float32, 1 = off
    log_min_p: torch.Tensor  # [n] float32, minus infinity = off


@dataclass(frozen=True)
class Asked:
    """Rows with logprobs; those with top logprobs come first."""

    rows: torch.Tensor  # [n] int32, of the logits at hand
    with_top: int


@dataclass(frozen=True)
class Penalised:
    """Penalties of all rows of a chunk."""

    slots: torch.Tensor  # [n] int32
    lengths: torch.Tensor  # [n] int32, tokens of the sequence; 0 = the row has no penalties
    prompts: torch.Tensor  # [n] int32, how many of them are the prompt
    repetition: torch.Tensor  # [n] float32, 1 = off
    frequency: torch.Tensor  # [n] float32, 0 = off
    presence: torch.Tensor  # [n] float32, 0 = off


@dataclass(frozen=True)
class Biased:
    """Every bias of a chunk's rows, flat."""

    rows: torch.Tensor  # [entries] int32, of the chunk
    token_ids: torch.Tensor  # [entries] int32
    values: torch.Tensor  # [entries] float32


@dataclass(frozen=True)
class Masked:
    """Rows of a chunk with a grammar."""

    rows: torch.Tensor  # [n] int32, of the chunk
    start: int  # which of the step's masks is the first one's; the others' follow


@dataclass(frozen=True)
class Forced:
    """Rows of a chunk whose thinking budget may be used up."""

    rows: torch.Tensor  # [n] int32, of the chunk
    slots: torch.Tensor  # beside rows, int32
    lengths: torch.Tensor  # beside rows, int32: tokens of the sequence
    prompts: torch.Tensor  # beside rows, int32: how many of them are the prompt
    budgets: torch.Tensor  # beside rows, int32
    begins: torch.Tensor  # beside rows, int32: the token that begins the section; -1 = it is open after the prompt
    ends: torch.Tensor  # beside rows, int32: the token that ends it


@dataclass(frozen=True)
class Adjusted:
    """A chunk of rows that are drawn from float32 copies of their logits.

    Their logits change, or their log-probabilities are of the distribution that they are drawn from.
    """

    rows: torch.Tensor  # [n] int32, of the slice
    scales: torch.Tensor  # [n] float32
    keys: torch.Tensor  # [n, 2] int32
    biased: Biased | None
    penalised: Penalised | None
    masked: Masked | None
    forced: Forced | None
    truncated: Truncated | None  # rows of the chunk
    asked: Asked | None  # rows of the chunk, for raw log-probabilities
    processed: Asked | None  # rows of the chunk, for processed log-probabilities


@dataclass(frozen=True)
class Slice:
    """Rows whose logits are made together. What is not None is beside the plain path."""

    start: int
    stop: int
    truncated: Truncated | None = None  # rows of the slice that are not adjusted
    asked: Asked | None = None  # rows of the slice that are not adjusted
    adjusted: tuple[Adjusted, ...] = ()


@dataclass(frozen=True)
class SampleRows:
    """A step's rows in batch order, padded with greedy ones whose outcome is not looked at."""

    slots: np.ndarray  # [rows] int64
    scales: torch.Tensor  # [padded] float32, one over the temperature; 0 = greedy
    keys: torch.Tensor  # [padded, 2] int32, of the noise
    slices: tuple[Slice, ...]
    asked: np.ndarray  # [n] int64, rows with logprobs, in the order of SampledOnDevice
    top_rows: np.ndarray  # [m] int64, rows with top logprobs, in the order of SampledOnDevice
    top_counts: np.ndarray  # beside top_rows
    masked: np.ndarray  # [k] int64, rows with a grammar, in the order of the step's masks

    @property
    def plain(self) -> bool:
        """Whether the same launches serve any rows of this padded size: what a CUDA graph may hold."""
        return all(not (part.truncated or part.asked or part.adjusted) for part in self.slices)

    @property
    def widest(self) -> int:
        """The most top logprobs that a row asked for."""
        return int(self.top_counts.max(initial=0))


class RowPreparer:
    """Makes ``SampleRows`` for logits in slices of ``slice_rows``, with float32 copies of ``chunk_rows`` at a time."""

    def __init__(self, slice_rows: int, chunk_rows: int) -> None:
        self._slice_rows, self._chunk_rows = slice_rows, chunk_rows

    def prepare(self, table: SlotTable, slots: np.ndarray, positions: np.ndarray, put: Put, padded: int) -> SampleRows:
        """``slots`` and ``positions`` are ``[rows]``, at most ``padded``; see ``FusedSampler.prepare``."""
        count = len(slots)
        scales, keys = np.zeros(padded, np.float32), np.zeros((padded, 2), np.int32)
        scales[:count] = scales_of(table.temperature[slots])
        keys[:count] = row_keys(table.seed[slots], table.sample_index[slots], positions)
        step = _Step(table, slots, positions, scales, keys, put, self._chunk_rows)
        uploaded = put(scales), put(keys)
        starts = range(0, padded, self._slice_rows)
        slices = tuple(step.slice(start, min(start + self._slice_rows, padded)) for start in starts)
        found = (step.asked, step.top, step.masked)
        asked, top, masked = (np.concatenate([np.empty(0, np.int64), *rows]) for rows in found)
        return SampleRows(slots, *uploaded, slices, asked, top, table.top_logprobs[slots[top]], masked)


class _Step:
    """The rows of one step while their parts are put together."""

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
        cut = (table.top_k[slots] > 0) | (table.top_p[slots] < 1) | (table.min_p[slots] > 0)
        self._cut = cut & (table.temperature[slots] > 0)
        self._raw = table.logprobs[slots] & ~table.processed[slots]
        self._processed = table.logprobs[slots] & table.processed[slots]
        self._forced = table.may_force(slots, positions)
        self._adjusted = table.biased[slots] | table.penalised[slots] | table.masked[slots]
        self._adjusted |= self._processed | self._forced
        self._plain = not (self._cut.any() or self._adjusted.any() or self._raw.any())
        self.asked: list[np.ndarray] = []
        self.top: list[np.ndarray] = []
        self.masked: list[np.ndarray] = []

    def slice(self, start: int, stop: int) -> Slice:
        if self._plain:
            return Slice(start, stop)
        rows = np.arange(start, min(stop, len(self._slots)))
        adjusted, rest = rows[self._adjusted[rows]], rows[~self._adjusted[rows]]
        truncated, asked = self._truncated(rest, rest - start), self._asked(rest, rest - start, self._raw)
        chunks = [adjusted[at : at + self._chunk_rows] for at in range(0, len(adjusted), self._chunk_rows)]
        return Slice(start, stop, truncated, asked, tuple(self._adjust(chunk, chunk - start) for chunk in chunks))

    def _truncated(self, rows: np.ndarray, places: np.ndarray) -> Truncated | None:
        """Of ``rows``, which are at ``places`` of the logits at hand, those that are cut."""
        cut = self._cut[rows]
        if not cut.any():
            return None
        slots = self._slots[rows[cut]]
        with np.errstate(divide="ignore"):
            log_min_p = np.log(self._table.min_p[slots])
        top_k = np.minimum(self._table.top_k[slots], np.iinfo(np.int32).max)
        return Truncated(
            self._integers(places[cut]),
            self._integers(top_k),
            self._put(self._table.top_p[slots]),
            self._put(log_min_p),
        )

    def _asked(self, rows: np.ndarray, places: np.ndarray, asked: np.ndarray) -> Asked | None:
        """Return those of ``rows``, at ``places`` of the logits at hand, for which ``asked [all rows]`` is true."""
        wanted = asked[rows]
        if not wanted.any():
            return None
        rows, places = rows[wanted], places[wanted]
        top = self._table.top_logprobs[self._slots[rows]] > 0
        order = np.argsort(~top, kind="stable")
        self.asked.append(rows[order])
        self.top.append(rows[top])
        return Asked(self._integers(places[order]), int(top.sum()))

    def _adjust(self, rows: np.ndarray, places: np.ndarray) -> Adjusted:
        within = np.arange(len(rows))
        return Adjusted(
            rows=self._integers(places),
            scales=self._put(self._scales[rows]),
            keys=self._put(self._keys[rows]),
            biased=self._biased(rows),
            penalised=self._penalised(rows),
            masked=self._masked(rows),
            forced=self._budgeted(rows),
            truncated=self._truncated(rows, within),
            # In the order in which their log-probabilities are written.
            asked=self._asked(rows, within, self._raw),
            processed=self._asked(rows, within, self._processed),
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
            repetition=self._put(table.repetition_penalty[slots]),
            frequency=self._put(table.frequency_penalty[slots]),
            presence=self._put(table.presence_penalty[slots]),
        )

    def _masked(self, rows: np.ndarray) -> Masked | None:
        within = np.flatnonzero(self._table.masked[self._slots[rows]])
        if len(within) == 0:
            return None
        start = sum(map(len, self.masked))
        self.masked.append(rows[within])
        return Masked(self._integers(within), start)

    def _budgeted(self, rows: np.ndarray) -> Forced | None:
        within = np.flatnonzero(self._forced[rows])
        if len(within) == 0:
            return None
        table, slots = self._table, self._slots[rows[within]]
        columns = (slots, self._positions[rows[within]], table.prompt_tokens[slots], table.think_tokens[slots])
        return Forced(*map(self._integers, (within, *columns, table.think_begin[slots], table.think_end[slots])))

    def _integers(self, values: np.ndarray) -> torch.Tensor:
        return self._put(values.astype(np.int32))
