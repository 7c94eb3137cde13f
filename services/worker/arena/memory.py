"""The memory of a rank that a sleep gives back."""

import contextlib

import torch

from services.common.errors import FailedPrecondition
from services.common.memory_parts import MemoryPart, Parts, part_names
from services.worker.arena.host_copy import HostCopy
from services.worker.arena.tensor_arena import TensorArena

_WEIGHTS = MemoryPart.WEIGHTS


class ModelMemory:
    """The weights and the KV cache of a rank, and which of them are asleep.

    The compute thread calls all methods except ``reserve_copy``, while no plan runs.
    """

    def __init__(self, weights: TensorArena, cache: TensorArena) -> None:
        self._arenas = {MemoryPart.WEIGHTS: weights, MemoryPart.KV_CACHE: cache}
        self.asleep: Parts = frozenset()
        self.dropped = False  # the weights have no content, even if they are awake
        self._copy: HostCopy | None = None  # kept for later sleeps, because pinning memory takes seconds
        self._sums: list[int] = []  # ``_weight_sums`` when the weights fell asleep

    def reserve_copy(self) -> None:
        """Allocate the memory for a copy of the weights. Any thread may call it. Raises ``FailedPrecondition``."""
        if self._copy is None:
            self._copy = HostCopy(self._arenas[_WEIGHTS].contents)

    def sleep(self, parts: Parts, *, drop: bool) -> int:
        """Give the memory of ``parts`` back. Return its size in bytes.

        The weights are dropped if ``drop`` is true, and else copied to the memory that ``reserve_copy`` has allocated.
        """
        self._synchronize()
        given = parts - self.asleep
        if _WEIGHTS in given and not self.dropped:
            self._sums = self._weight_sums()
            if not drop and self._copy is not None:
                self._copy.read()
        if _WEIGHTS in parts and drop:
            self.dropped, self._copy = True, None
        for part in given:
            self._arenas[part].release()
        self.asleep |= given
        self._empty_caches()
        return sum(self._arenas[part].nbytes for part in given)

    def wake(self, parts: Parts) -> None:
        """Take memory for ``parts`` again, with the weights of the copy, if there is one.

        Raises ``FailedPrecondition`` if the device has too little memory; then nothing has changed.
        """
        woken = parts & self.asleep
        with contextlib.ExitStack() as undo:
            for part in sorted(woken):
                try:
                    self._arenas[part].restore()
                except torch.OutOfMemoryError as error:
                    raise self._out_of_memory(woken) from error
                undo.callback(self._arenas[part].release)
            if _WEIGHTS in woken and not self.dropped and self._copy is not None:
                self._copy.write()
            self._synchronize()
            undo.pop_all()
        self.asleep -= woken

    def mark_replaced(self) -> None:
        """Record that all weights have been written."""
        self.dropped = False

    def mark_reloaded(self) -> None:
        """Record that dropped weights have been read from their files. Raises ``FailedPrecondition`` if they differ."""
        if self._weight_sums() != self._sums:
            raise FailedPrecondition("the files have changed")
        self.dropped = False

    def _weight_sums(self) -> list[int]:
        """Return the sum of the 64-bit words of each block."""
        return [int(content.view(torch.int64).sum()) for content in self._arenas[_WEIGHTS].contents]

    def _out_of_memory(self, parts: Parts) -> FailedPrecondition:
        device = self._arenas[_WEIGHTS].device
        needed, free = sum(self._arenas[part].nbytes for part in parts), torch.cuda.mem_get_info(device)[0]
        names = " and ".join(part_names(parts))
        return FailedPrecondition(
            f"{names} need {needed / 2**30:.1f} GiB of {device}, and {free / 2**30:.1f} GiB are free; free the memory"
            " of other programs, and wake again"
        )

    def _synchronize(self) -> None:
        if (device := self._arenas[_WEIGHTS].device).type == "cuda":
            torch.cuda.synchronize(device)

    def _empty_caches(self) -> None:
        """Give back the memory that torch holds for later allocations."""
        if self._arenas[_WEIGHTS].device.type == "cuda":
            torch.cuda.empty_cache()
            if self._copy is None:
                torch._C._host_emptyCache()  # pinned memory of a copy
