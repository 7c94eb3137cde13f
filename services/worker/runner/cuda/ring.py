"""Buffers and events of the steps in flight, used in turn."""

import threading
from itertools import cycle

import torch

from services.common.plan.types import Limits
from services.worker.runner.cuda.upload import Upload

# Steps that may be on the device at once. The host waits for the oldest when all are: more would only be further ahead.
_PLACES = 4
# Bytes to upload for each token or row of a step, at most, without page tables; what is beyond goes by itself.
_BYTES_PER_ROW = 128
_SMALLEST_UPLOAD = 1 << 20
# Seconds between two looks at whether a place will ever be free.
_PATIENCE_S = 1.0


class Place:
    """What one step in flight needs. The thread that answers waits and reads; the compute thread does all else."""

    def __init__(self, ring: "Ring", index: int, limits: Limits, device: torch.device) -> None:
        self.ring, self.index = ring, index
        rows = limits.max_slots + limits.max_tokens_per_step
        self.upload = Upload(max(_SMALLEST_UPLOAD, rows * _BYTES_PER_ROW), device)
        self.results = torch.empty(limits.max_slots, dtype=torch.int32, device=device)
        self.host_results = ring.host_results[index]
        self.tokens = self.host_results.numpy()  # the same memory
        self.uploaded = torch.cuda.Event()
        self.started = torch.cuda.Event(enable_timing=True)
        self.forwarded: torch.cuda.Event | None = None  # where sampling begins; None = not known
        self.ended: torch.cuda.Event = None  # type: ignore[assignment]  # until ``end``; the next step looks at it, too
        self.previous_end: torch.cuda.Event | None = None  # of the step before, for the time between
        self.taken = threading.Event()  # the host has read the results
        self.taken.set()
        # Waiting for the first takes no processor time, waiting for the second no time to wake up.
        self._long, self._short = torch.cuda.Event(blocking=True), torch.cuda.Event()
        self._done: torch.cuda.Event = None  # type: ignore[assignment]  # until then

    def begin_sampling(self) -> None:
        """The forward pass is launched."""
        self.forwarded = torch.cuda.Event(enable_timing=True)
        self.forwarded.record()

    def end(self, *, long: bool = False) -> None:
        """All that the step computes is launched, and, if nothing else is said, all that it sends back."""
        self.ended = self._done = self.ring.next_end(long=long)
        self.ended.record()

    def finished(self, *, long: bool) -> None:
        """What the step sends back is launched, too, on the current stream."""
        self._done = self._long if long else self._short
        self._done.record()

    def wait(self) -> None:
        """Until the device has done the step; does not hold Python's lock."""
        self._done.synchronize()

    def abandon(self) -> None:
        """Nobody will take results. Waits for what was launched, which reads the buffers."""
        try:
            self.finished(long=False)
            self.wait()
        finally:
            self.taken.set()


class Ring:
    """Hands out the places in turn: one for each micro-batch of a step."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        # No step may wait for places that it has itself, and the one before has as many.
        self.places = max(_PLACES, 2 * limits.max_micro_batches if limits.max_micro_batches > 1 else 0)
        # The tokens of each place's step.
        self.host_results = torch.empty(
            self.places, limits.max_slots, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        # Nobody looks at a step's end any more when so many steps behind it have begun.
        self._ends = {
            long: cycle([torch.cuda.Event(enable_timing=True, blocking=long) for _ in range(2 * self.places)])
            for long in (False, True)
        }
        self._places = cycle([Place(self, index, limits, device) for index in range(self.places)])
        self._broken: BaseException | None = None  # written by the thread that takes results
        self._last_end: torch.cuda.Event | None = None

    def next(self) -> Place:
        """The place for the next step, once the results of the step that had it are taken."""
        place = next(self._places)
        while not place.taken.wait(_PATIENCE_S):
            if self._broken is not None:
                raise RuntimeError("the device failed in an earlier step") from self._broken
        place.taken.clear()
        place.upload.begin()
        place.forwarded = None
        place.previous_end = self._last_end
        return place

    def next_end(self, *, long: bool) -> torch.cuda.Event:
        """The event for the end of the step that is being launched. Waiting for one that is ``long`` takes no processor
        time, waiting for another no time to wake up."""
        self._last_end = next(self._ends[long])
        return self._last_end

    def give_up(self, error: BaseException) -> None:
        """From any thread: results that are still owed are never taken."""
        self._broken = error

    def forget_last(self) -> None:
        """What comes next follows nothing."""
        self._last_end = None
