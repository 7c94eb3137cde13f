"""Buffers and events of the steps in flight, used in turn."""

import threading
from itertools import cycle

import torch

from services.common.plan.types import WorkerLimits
from services.worker.runner.cuda.transfers import Upload

# Steps in flight. When all are, the host waits for the oldest: a larger lead would not make the device faster.
_PLACES = 4
# Bytes of the upload buffer for each token or row of a step. Page tables may need more, which are uploaded separately.
_BYTES_PER_ROW = 128
_SMALLEST_UPLOAD = 1 << 20
# Uploads of up to this many bytes use the stream of the kernels: a second stream takes more time than it saves.
_SHORT_UPLOAD = 16 * 1024
# Interval of checks for a failure of the device while the host waits for a place.
_POLL_S = 1.0


class Place:
    """The buffers and events of one step in flight.

    The answering thread waits for the step and reads its results. All else belongs to the compute thread.
    """

    def __init__(self, ring: "Ring", index: int, limits: WorkerLimits, device: torch.device) -> None:
        self.ring, self.index = ring, index
        rows = limits.max_slots + limits.max_tokens_per_step
        self.upload = Upload(max(_SMALLEST_UPLOAD, rows * _BYTES_PER_ROW), device)
        self.results = torch.empty(limits.max_slots, dtype=torch.int32, device=device)
        self.host_results = ring.host_results[index]
        self.tokens = self.host_results.numpy()  # the same memory
        self._uploaded = torch.cuda.Event()
        self.started = torch.cuda.Event(enable_timing=True)
        self.forwarded: torch.cuda.Event | None = None  # the start of sampling; None = not measured
        self.ended: torch.cuda.Event = None  # type: ignore[assignment]  # set by ``end``; the next step reads it as well
        self.previous_end: torch.cuda.Event | None = None  # of the previous step, to measure idle time
        self.taken = threading.Event()  # the host has read the results
        self.taken.set()
        # A wait for the first event takes no processor time. A wait for the second ends without delay.
        self._long, self._short = torch.cuda.Event(blocking=True), torch.cuda.Event()
        self._done: torch.cuda.Event = None  # type: ignore[assignment]  # set by ``end``

    def send(self) -> None:
        """Upload the arrays that were put since the last call. Later launches find them on the device."""
        if self.upload.waiting <= _SHORT_UPLOAD:
            self.upload.send()
            return
        with torch.cuda.stream(self.ring.uploads):
            self.upload.send()
            self._uploaded.record()
        torch.cuda.current_stream().wait_event(self._uploaded)

    def begin_sampling(self) -> None:
        """Record that the forward pass is launched."""
        self.forwarded = torch.cuda.Event(enable_timing=True)
        self.forwarded.record()

    def end(self, *, long: bool = False) -> None:
        """Record that all computations are launched. Unless ``finished`` follows, so are all downloads."""
        self.ended = self._done = self.ring.next_end(long=long)
        self.ended.record()

    def finished(self, *, long: bool) -> None:
        """Record that the downloads are launched, on the current stream."""
        self._done = self._long if long else self._short
        self._done.record()

    def wait(self) -> None:
        """Wait until the device has completed the step, without Python's global lock."""
        self._done.synchronize()

    def abandon(self) -> None:
        """Free the place of a failed step, after the launched work, which reads the buffers."""
        try:
            self.finished(long=False)
            self.wait()
        finally:
            self.taken.set()


class Ring:
    """The places, used in turn: one for each micro-batch of a step."""

    def __init__(self, limits: WorkerLimits, device: torch.device) -> None:
        self.uploads = torch.cuda.Stream()
        # Enough for two steps: a step must not wait for its own places, while the previous one holds as many.
        self.places = max(_PLACES, 2 * limits.max_micro_batches if limits.max_micro_batches > 1 else 0)
        # Sampled tokens by place.
        self.host_results = torch.empty(
            self.places, limits.max_slots, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        # An end is read until the following step is read, so twice the number of places is enough.
        self._ends = {
            long: cycle([torch.cuda.Event(enable_timing=True, blocking=long) for _ in range(2 * self.places)])
            for long in (False, True)
        }
        self._places = cycle([Place(self, index, limits, device) for index in range(self.places)])
        self._broken: BaseException | None = None  # written by the answering thread
        self._last_end: torch.cuda.Event | None = None

    def next(self) -> Place:
        """Wait until the results of the oldest step are read, and return its place.

        Raises ``RuntimeError`` if the device has failed.
        """
        place = next(self._places)
        while not place.taken.wait(_POLL_S):
            if self._broken is not None:
                raise RuntimeError("the device failed in an earlier step") from self._broken
        place.taken.clear()
        place.upload.begin()
        place.forwarded = None
        place.previous_end = self._last_end
        return place

    def next_end(self, *, long: bool) -> torch.cuda.Event:
        """Return the event for the end of the current step. ``long``: a wait for it takes no processor time."""
        self._last_end = next(self._ends[long])
        return self._last_end

    def fail(self, error: BaseException) -> None:
        """Record that the device has failed, so that no further results are read. Any thread may call it."""
        self._broken = error

    def forget_last(self) -> None:
        """Measure no idle time before the next step."""
        self._last_end = None
