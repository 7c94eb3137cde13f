"""What the device knows of the slots, and how a plan changes it."""

from dataclasses import dataclass

import torch

from services.worker.kv_cache import KvCache
from services.worker.runner.cuda.state_kernels import scatter
from services.worker.runner.plan import Limits


@dataclass(frozen=True)
class DeviceState:
    """Changed by kernels only, in the order of the steps."""

    last_tokens: torch.Tensor  # [max_slots] int32
    page_table: torch.Tensor  # [max_slots, max_pages] int32

    @classmethod
    def empty(cls, limits: Limits, device: torch.device) -> "DeviceState":
        """All zero."""
        table = torch.zeros(limits.max_slots, limits.max_pages_per_slot, dtype=torch.int32, device=device)
        return cls(torch.zeros(limits.max_slots, dtype=torch.int32, device=device), table)


@dataclass(frozen=True)
class Updates:
    """A plan's changes of pages, on their way to the device."""

    indices: torch.Tensor | None  # [n] int64, places in the flat page table; None = none change
    pages: torch.Tensor | None  # beside indices, int32
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # sources, targets [n] int64, one pair after the other

    def apply(self, state: DeviceState, cache: KvCache) -> None:
        """Launch the changes."""
        if self.indices is not None:
            scatter(state.page_table, self.indices, self.pages)
        for sources, targets in self.copies:
            cache.copy_pages(sources, targets)
