"""Plans for measurements of a worker: those of a recording, or synthetic decode steps."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.local_worker import refuse
from services.common.plan.codec import decode_plan
from services.common.plan.types import NO_GROUPS, Admission, Batch, Groups, Plan, SamplingSettings, WorkerLimits
from services.scheduler.record.reader import Recording, RecordingError, find_recordings
from tokasaurus.common.v1.sampling_pb2 import Sampling
from tokasaurus.worker.v1 import plan_pb2

PAGE_SIZE = 16  # default of synthetic plans


@dataclass(frozen=True)
class MadeUp:
    """Synthetic plans: ``rows`` sequences decode, in ``groups`` groups of equal size that share ``prefix`` tokens."""

    rows: int
    groups: int
    prefix: int  # tokens; the largest multiple of the page size is shared
    own: int  # mean tokens behind the prefix at the start, from 1 to twice the mean
    temperature: float = 0.6

    def pages(self, steps: int, page_size: int) -> int:
        """Return an upper bound of the pages that ``steps`` steps need."""
        return self.groups * (self.prefix // page_size) + self.rows * -(-(2 * self.own + steps) // page_size)

    def plans(self, steps: int, limits: WorkerLimits) -> Iterator[Plan]:
        """Yield the plans. The first admits all sequences, with all tokens but the last taken as cached."""
        size, rows = limits.page_size, self.rows
        random = np.random.default_rng(0)
        shared = self.prefix // size if self.groups else 0
        fresh = self.groups * shared  # the next page
        lengths = shared * size + random.integers(1, 2 * self.own, rows)
        bounds = np.arange(self.groups + 1) * rows // max(1, self.groups)
        group_of = np.searchsorted(bounds, np.arange(rows), side="right") - 1
        admissions = []
        for slot, length in enumerate(lengths.tolist()):
            own = -(-(length + 1) // size) - shared
            pages = np.concatenate((group_of[slot] * shared + np.arange(shared), np.arange(fresh, fresh + own)))
            fresh += own
            token_ids = np.full(length + 1, slot * 7 % limits.vocab_size)
            sampling = SamplingSettings(Sampling(temperature=self.temperature, seed=slot))
            admissions.append(Admission(slot, token_ids, length, pages, sampling))
        groups = Groups(bounds[:-1], np.diff(bounds), np.full(self.groups, shared)) if shared else NO_GROUPS
        batch = Batch(np.arange(rows), np.ones(rows, np.int64))
        yield Plan(1, admissions=tuple(admissions), batch=batch, groups=groups)
        for number in range(2, steps + 1):
            lengths += 1
            full = np.flatnonzero(lengths % size == 0)
            pages = np.arange(fresh, fresh + len(full))
            fresh += len(full)
            yield Plan(number, append_slots=full, append_pages=pages)


class RecordedStream:
    """The plans of a recording, in memory."""

    def __init__(self, path: str, most: int | None) -> None:
        """Read at most ``most`` plans of ``path``: a file, or the largest file of a directory. May exit with 2."""
        try:
            found = max(find_recordings(path), key=lambda each: each.stat().st_size)
            recording = Recording(found)
            self.path: Path = found
            self.info = recording.info
            self._plans: list[plan_pb2.StepPlan] = []
            for record in recording.steps():
                if len(self._plans) == most:
                    break
                self._plans.append(record.plan.plan)
        except RecordingError as error:
            refuse(f"record={error}")

    def __len__(self) -> int:
        return len(self._plans)

    def defaults(self) -> dict[str, int]:
        """Return the flags of a worker with the sizes of the recorded one."""
        info = self.info
        return {
            "page_size": info.page_size,
            "kv_cache_num_tokens": info.page_count * info.page_size,
            "max_seqs_per_forward": info.max_slots,
            "max_tokens_per_forward": info.max_tokens_per_step,
        }

    def check(self, limits: WorkerLimits) -> None:
        """Exit with status 2 if the plans exceed ``limits``."""
        info = self.info
        if limits.page_size != info.page_size:
            refuse(f"record={self.path}: page_size={info.page_size}, but the worker has {limits.page_size}")
        for name in ("page_count", "max_slots", "max_tokens_per_step", "max_context_tokens", "vocab_size"):
            if getattr(limits, name) < getattr(info, name):
                refuse(
                    f"record={self.path}: recorded with {name}={getattr(info, name)}, but the worker has"
                    f" {getattr(limits, name)}: use the recorded model and flags"
                )

    def plans(self) -> Iterator[tuple[Plan, int]]:
        """Yield each plan with the nanoseconds that decoding took."""
        for message in self._plans:
            started = time.perf_counter_ns()
            yield decode_plan(message), time.perf_counter_ns() - started
