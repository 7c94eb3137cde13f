"""Buffers and events of the steps in flight, used in turn."""

import threading

import torch

from services.worker.runner.cuda.upload import Upload
from services.worker.runner.plan import Limits

# Steps that may be on the device at once. The host waits for the oldest when all are: more would only be further ahead.
_PLACES = 4
# Bytes to upload for each token or row of a step, at most, without page tables; what is beyond goes by itself.
_BYTES_PER_ROW = 128
_SMALLEST_UPLOAD = 1 << 20
# Seconds between two looks at whether a place will ever be free.
_PATIENCE_S = 1.0


class Place:
    """What one step in flight needs. The thread that answers waits and reads; the compute thread does all else."""

    def __init__(self, ring: "Ring", limits: Limits, device: torch.device) -> None:
        self.ring = ring
        rows = limits.max_slots + limits.max_tokens_per_step
        self.upload = Upload(max(_SMALLEST_UPLOAD, rows * _BYTES_PER_ROW), device)
        self.results = torch.empty(limits.max_slots, dtype=torch.int32, device=device)
        self.host_results = torch.empty(limits.max_slots, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.uploaded = torch.cuda.Event()
        self.started = torch.cuda.Event(enable_timing=True)
        self.forwarded: torch.cuda.Event | None = None  # where sampling begins; None = not known
        self.ended = torch.cuda.Event(enable_timing=True)  # a new one each time: the next step looks at it, too
        self.taken = threading.Event()  # the host has read the results
        self.taken.set()
        # Waiting for the first takes no processor time, waiting for the second no time to wake up.
        self._long, self._short = torch.cuda.Event(blocking=True), torch.cuda.Event()
        self._done: torch.cuda.Event | None = None
        self.previous_end: torch.cuda.Event | None = None  # of the step before, for the time between

    def begin_sampling(self) -> None:
        """The forward pass is launched."""
        self.forwarded = torch.cuda.Event(enable_timing=True)
        self.forwarded.record()

    def finished(self, *, long: bool) -> None:
        """All that the step does on the current stream is launched."""
        self._done = self._long if long else self._short
        self._done.record()

    def wait(self) -> None:
        """Until the device has done the step; does not hold Python's lock."""
        if self._done is not None:
            self._done.synchronize()


class Ring:
    """Hands out the places in turn."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._places = [Place(self, limits, device) for _ in range(_PLACES)]
        self._next = 0
        self._broken: BaseException | None = None  # written by the thread that takes results
        self._last_end: torch.cuda.Event | None = None

    def next(self) -> Place:
        """The place for the next step, once the device is through with the step that had it."""
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        while not place.taken.wait(_PATIENCE_S):
            if self._broken is not None:
                raise RuntimeError("the device failed in an earlier step") from self._broken
        place.taken.clear()
        place.wait()
        place.upload.begin()
        place.forwarded = None
        place.previous_end, place.ended = self._last_end, torch.cuda.Event(enable_timing=True)
        self._last_end = place.ended
        return place

    def give_up(self, error: BaseException) -> None:
        """From any thread: results that are still owed are never taken."""
        self._broken = error

    def forget_last(self) -> None:
        """What comes next follows nothing."""
        self._last_end = None
