"""The inputs of a captured step as one array: the host fills it, one copy uploads it, and a graph reads it."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from services.worker.attention.spans import TILE_FIELDS
from services.worker.runner.cuda.state import PageChanges
from services.worker.step.noise import keys_at
from services.worker.step.slots import SlotTable

_ALIGNED = 4  # int32 values: kernels are compiled for addresses that are multiples of 16 bytes

Array = TypeVar("Array", np.ndarray, torch.Tensor)


class Fields(NamedTuple, Generic[Array]):
    """Views of a block, as arrays on the host or tensors on the device. Int32 unless stated otherwise."""

    slots: Array  # [size], -1 = padding
    # [size]. Neither here nor in an upload does this come first: compilers make separate code for a tensor at the start
    # of its memory.
    positions: Array
    known: Array  # [size], token id; -1 = the slot's last sampled token
    scales: Array  # [size] float32, one over the temperature; 0 = greedy
    keys: Array  # [size, 2], keys of the noise
    where: Array  # [1], index of the step's first result
    append_slots: Array  # [capacity], -1 = no page is appended
    append_places: Array  # beside append_slots, index in the slot's page table
    append_pages: Array  # beside append_slots
    prefix_tokens: Array | None  # [size], 0 = none; None without groups
    tiles: Array | None  # [tiles, TILE_FIELDS] of the groups; tiles of zeros do nothing


@dataclass(frozen=True)
class Layout:
    """The layout of a block for ``size`` rows. ``tiles``: tiles of groups, or None without groups."""

    size: int
    tiles: int | None

    def empty(self, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        """Return a block of padding, int32."""
        block = torch.zeros(self._cuts()[-1][1], dtype=torch.int32, device=device, pin_memory=pinned)
        fields = self.fields(block)
        for field in (fields.append_slots, fields.slots, fields.known):
            field.fill_(-1)
        return block

    def fields(self, block: Array) -> Fields[Array]:
        """Return the fields of a block with this layout."""
        float32 = torch.float32 if torch.is_tensor(block) else np.float32
        parts = [block[begin:end] for begin, end in self._cuts()]
        slots, positions, known, scales, keys, *appended = parts[:9]
        grouped = (None, None) if self.tiles is None else (parts[9], parts[10].reshape(-1, TILE_FIELDS))
        return Fields(slots, positions, known, scales.view(float32), keys.reshape(-1, 2), *appended, *grouped)  # type: ignore[arg-type]

    def _cuts(self) -> list[tuple[int, int]]:
        """Return the start and the end of each field."""
        capacity = _aligned(self.size)
        lengths = [*[self.size] * 4, 2 * self.size, 1, *[capacity] * 3]
        if self.tiles is not None:
            lengths += [self.size, self.tiles * TILE_FIELDS]
        cuts, begin = [], 0
        for length in lengths:
            cuts.append((begin, begin + length))
            begin = _aligned(begin + length)
        return cuts


def fill_in(fields: Fields[np.ndarray], where: int, slots: np.ndarray, begins: np.ndarray, table: SlotTable) -> None:
    """Write the rows of a step that computes one token of each of ``slots [rows]``, at positions ``begins [rows]``.

    ``where``: index of the step's first result.
    """
    count = len(slots)
    fields.where[0] = where
    fields.slots[:count] = slots
    fields.positions[:count] = begins
    fields.known[:] = -1
    for row in np.flatnonzero(begins < table.given[slots]).tolist():
        fields.known[row] = table.prompts[slots[row]][begins[row]]
    fields.scales[:count] = table.scales[slots]
    fields.keys[:count] = keys_at(table.stems[slots], begins + 1)
    if count < len(fields.slots):
        fields.slots[count:] = -1
        fields.scales[count:] = 0


def fill_in_groups(fields: Fields[np.ndarray], prefix_tokens: np.ndarray, tiles: np.ndarray) -> None:
    """Write ``prefix_tokens [rows]`` and the tiles of a step with groups. The graph must be one with groups."""
    for field, values in ((fields.prefix_tokens, prefix_tokens), (fields.tiles, tiles)):
        if field is None:
            raise ValueError("this graph has no groups")
        field[: len(values)] = values
        field[len(values) :] = 0


def append(fields: Fields[np.ndarray], changes: PageChanges) -> bool:
    """Write ``changes``, which the graph then applies. If there is no room for them, write none and return False."""
    count = len(changes) if len(changes) <= len(fields.append_slots) else 0
    fields.append_slots[count:] = -1
    if count:
        fields.append_slots[:count] = changes.slots
        fields.append_places[:count] = changes.places
        fields.append_pages[:count] = changes.pages
    return count == len(changes)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED
