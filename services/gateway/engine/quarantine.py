"""Quarantine of requests that may crash schedulers, so that innocent requests beside them are not failed."""

from collections.abc import Collection

from services.gateway.engine.active_request import ActiveSample, SchedulerRequest

SUSPICIOUS = 2  # losses without a token in between that make a sample a suspect
PROVEN = 3  # losses as the only suspect that prove it
_OBSERVATION_S = 1.0  # a suspect that has run for this time without a loss no longer limits the others


class FailoverQuarantine:
    """Limits how many suspects run at once. Owned by ``Failover``. Times are of ``time.monotonic``.

    A suspect is a sample with ``SUSPICIOUS`` losses and no token since. At first one scheduler request with suspects
    may run. The limit grows by one for each that runs without a loss. After a loss it falls to
    an eighth of those that run.

    Schedulers are also lost for other reasons. An innocent sample fails only if it meets five such losses without a
    token in between, and is the only suspect in three of them.
    """

    def __init__(self) -> None:
        self._observed: dict[SchedulerRequest, float] = {}  # to the time of sending
        self._limit = 1

    @property
    def busy(self) -> bool:
        """True while suspects are observed."""
        return bool(self._observed)

    def admits(self, request: SchedulerRequest) -> bool:
        """Return whether ``request`` may be sent."""
        return len(self._observed) < self._limit or not any(map(_is_suspect, request.samples))

    def sent(self, request: SchedulerRequest, now: float) -> None:
        """Observe ``request``, which was sent to a scheduler, if it has suspects."""
        if any(map(_is_suspect, request.samples)):
            self._observed[request] = now

    def forget(self, request: SchedulerRequest) -> None:
        """Stop observing ``request``, which a scheduler refused."""
        self._observed.pop(request, None)

    def release(self, now: float) -> None:
        """Stop observing requests that have run without a loss, and raise the limit for each."""
        for request, since in list(self._observed.items()):
            cleared = not all(map(_is_suspect, request.samples))
            if cleared or now - since >= _OBSERVATION_S or not request.parent.scheduler_requests:
                del self._observed[request]
                self._limit += 1

    def lost(self, samples: Collection[ActiveSample]) -> list[ActiveSample]:
        """Record the loss of a scheduler that ran ``samples``. Return those that are proven to crash schedulers."""
        suspects = [sample for sample in samples if _is_suspect(sample)]
        for sample in samples:
            sample.losses += 1  # until its next token
        if affected := [request for request in self._observed if any(sample in samples for sample in request.samples)]:
            self._limit = max(1, len(self._observed) // 8)
            for request in affected:
                del self._observed[request]
        if len({(sample.request, sample.prompt_index) for sample in suspects}) == 1:
            for sample in suspects:
                sample.sole_suspect_losses += 1
        return [sample for sample in suspects if sample.sole_suspect_losses >= PROVEN]


def _is_suspect(sample: ActiveSample) -> bool:
    return sample.losses >= SUSPICIOUS and sample.ending is None
