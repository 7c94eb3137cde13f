"""The state of the slots on the device, and its changes by a plan."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.common.plan.types import Plan, WorkerLimits
from services.worker.attention.kv_cache import KvCache
from services.worker.runner.cuda.state_kernels import scatter

# Pages of one copy, which needs a temporary buffer for them.
_COPIES_AT_ONCE = 64


@dataclass(frozen=True)
class DeviceState:
    """The state on the device. Only kernels change it, in the order of the steps."""

    last_tokens: torch.Tensor  # [max_slots] int32
    page_table: torch.Tensor  # [max_slots, max_pages] int32

    @classmethod
    def empty(cls, limits: WorkerLimits, device: torch.device) -> "DeviceState":
        """Return a state of zeros."""
        table = torch.zeros(limits.max_slots, limits.max_pages_per_slot, dtype=torch.int32, device=device)
        return cls(torch.zeros(limits.max_slots, dtype=torch.int32, device=device), table)


@dataclass(frozen=True)
class PageChanges:
    """The changes of page tables by a plan, on the host."""

    slots: np.ndarray  # [n] int64
    places: np.ndarray  # beside slots, index in the slot's page table
    pages: np.ndarray  # beside slots, the new page

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def joined(cls, parts: "list[PageChanges]") -> "PageChanges":
        """Concatenate ``parts``."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((part.slots, part.places, part.pages) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns)) if parts else NO_CHANGES


NO_CHANGES = PageChanges(*[np.empty(0, np.int64)] * 3)


@dataclass(frozen=True)
class Updates:
    """The changes of pages by a plan, in an upload."""

    indices: torch.Tensor | None  # [n] int64, indices in the flat page table; None = no changes
    pages: torch.Tensor | None  # beside indices, int32
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # sources and targets [n] int64, applied in order

    @classmethod
    def put(cls, changes: PageChanges, plan: Plan, width: int, put: Callable[[np.ndarray], torch.Tensor]) -> "Updates":
        """Put ``changes`` and the copies of ``plan`` into an upload. ``width``: entries of a slot's page table."""
        parts = (slice(start, start + _COPIES_AT_ONCE) for start in range(0, len(plan.copy_sources), _COPIES_AT_ONCE))
        copies = [(put(plan.copy_sources[part]), put(plan.copy_targets[part])) for part in parts]
        if not len(changes):
            return cls(None, None, copies)
        indices = changes.slots * width + changes.places
        return cls(put(indices.astype(np.int64)), put(changes.pages.astype(np.int32)), copies)

    def apply(self, state: DeviceState, cache: KvCache) -> None:
        """Launch the changes."""
        if self.indices is not None:
            scatter(state.page_table, self.indices, self.pages)  # type: ignore[arg-type]  # not None, as indices are
        for sources, targets in self.copies:
            cache.copy_pages(sources, targets)
