"""Whether a scheduler serves, and if not, why."""


class Readiness:
    """Owned by the step loop."""

    def __init__(self) -> None:
        self.draining = False  # what is new is refused
        self._connected = False
        # While it is not: why the last connection ended, and why there is no other yet.
        self._lost, self._missing = "its worker does not answer yet", ""

    def connect(self) -> None:
        """A worker is there."""
        self._connected = True

    def lose(self, reason: str) -> None:
        """It is not there any more."""
        self._connected, self._lost, self._missing = False, reason, ""

    def miss(self, reason: str) -> None:
        """The link has found no other."""
        if reason != self._lost:
            self._missing = reason

    def drain(self) -> None:
        """For good."""
        self.draining = True

    @property
    def not_ready_reason(self) -> str:
        """Empty when it serves."""
        if self.draining:
            return "draining"
        if self._connected:
            return ""
        return f"{self._lost}; now: {self._missing}" if self._missing else self._lost
