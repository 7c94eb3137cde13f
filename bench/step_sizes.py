"""The amount of work of each plan, computed from the lengths of all sequences."""

from dataclasses import dataclass

import numpy as np

from services.common.plan.types import NO_GROUPS, NO_ROWS, Batch, Groups, Plan, WorkerLimits


@dataclass(frozen=True)
class StepSizes:
    """The work of a step."""

    rows: int = 0
    tokens: int = 0
    samples: int = 0
    chunk_tokens: int = 0  # of rows of several tokens
    own_context: int = 0  # tokens outside shared prefixes that rows of one token attend to
    prefix_tokens: int = 0  # tokens of the prefixes of all groups
    prefix_pairs: int = 0  # pairs of a row of one token and a token of its prefix
    chunk_context: int = 0  # tokens that rows of several tokens attend to
    chunk_pairs: int = 0  # pairs of a token of a chunk and a token that it attends to
    copied_pages: int = 0


class SizeTracker:
    """The lengths of a worker's slots after each plan. Plans must be valid."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._page_size = limits.page_size
        self._known, self._computed = np.zeros(limits.max_slots, np.int64), np.zeros(limits.max_slots, np.int64)
        self._batch: Batch = NO_ROWS
        self._groups: Groups = NO_GROUPS

    def apply(self, plan: Plan) -> StepSizes:
        """Apply ``plan``, and return its work."""
        for admission in plan.admissions:
            self._known[admission.slot] = len(admission.token_ids)
            self._computed[admission.slot] = admission.cached_tokens
        if plan.batch is not None:
            self._batch = plan.batch
        if plan.groups is not None:
            self._groups = plan.groups
        slots, counts = self._batch.slots, self._batch.token_counts
        begins = self._computed[slots]
        ends = begins + counts
        single = counts == 1
        shared = self._prefixes(single)
        sampled = slots[ends == self._known[slots]]
        self._computed[slots] = ends
        self._known[sampled] += 1
        chunk_ends, chunk_counts = ends[~single], counts[~single]
        pairs = chunk_counts * begins[~single] + chunk_counts * (chunk_counts + 1) // 2
        return StepSizes(
            rows=len(slots),
            tokens=int(counts.sum()),
            samples=len(sampled),
            chunk_tokens=int(chunk_counts.sum()),
            own_context=int((ends - shared)[single].sum()),
            prefix_tokens=int(self._groups.prefix_pages.sum()) * self._page_size if shared.any() else 0,
            prefix_pairs=int(shared.sum()),
            chunk_context=int(chunk_ends.sum()),
            chunk_pairs=int(pairs.sum()),
            copied_pages=len(plan.copy_sources),
        )

    def _prefixes(self, single: np.ndarray) -> np.ndarray:
        """Return the tokens of each row's shared prefix, ``[rows]`` int64. 0 = no group, or a row of several tokens."""
        shared, groups = np.zeros(len(single), np.int64), self._groups
        for start, count, pages in zip(groups.starts, groups.counts, groups.prefix_pages, strict=True):
            shared[start : start + count] = pages * self._page_size
        return np.where(single, shared, 0)
