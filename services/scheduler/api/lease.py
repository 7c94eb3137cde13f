"""The right of one client at a time to update the weights of a scheduler."""

import time
from collections.abc import Callable

from services.common.errors import FailedPrecondition, InvalidRequest

_MOST_HOLDER = 128  # characters
_MOST_NS = 60 * 10**9


class UpdateLease:
    """A lease that ends by itself if its holder is lost. Used on the event loop."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._holder, self._until_ns = "", 0

    def take(self, holder: str, duration_ns: int) -> None:
        """Give the lease to ``holder`` for ``duration_ns`` from now, or end it if that is 0.

        Raises ``InvalidRequest``, and ``FailedPrecondition`` while another holder has the lease.
        """
        if not 1 <= len(holder) <= _MOST_HOLDER:
            raise InvalidRequest(f"expected 1 to {_MOST_HOLDER} characters", field="holder")
        if duration_ns > _MOST_NS:
            raise InvalidRequest(f"expected at most {_MOST_NS} (60 s)", field="duration_ns")
        now_ns = self._now_ns()
        if self._holder != holder and now_ns < self._until_ns:
            if not duration_ns:
                return
            left_s = (self._until_ns - now_ns) * 1e-9
            raise FailedPrecondition(
                "another gateway updates the weights: repeat the update when the other one has ended. If that gateway"
                f" was lost, its lease ends after {left_s:.0f} s"
            )
        self._holder, self._until_ns = holder, now_ns + duration_ns
