"""Readiness of a scheduler, and the reason if it is not ready."""


class Readiness:
    """Readiness as determined by the worker's connection and draining. Used by the step loop."""

    def __init__(self) -> None:
        self.draining = False  # new requests are refused
        self._connected = False
        # Reasons while no worker is connected: for the end of the last connection, and for the lack of a new one.
        self._lost, self._missing = "its worker does not answer yet", ""

    def connect(self) -> None:
        """Record that a worker connected."""
        self._connected = True

    def lose(self, reason: str) -> None:
        """Record that the worker was lost."""
        self._connected, self._lost, self._missing = False, reason, ""

    def miss(self, reason: str) -> None:
        """Record why the link cannot connect."""
        if reason != self._lost:
            self._missing = reason

    def drain(self) -> None:
        """Start draining, which cannot be undone."""
        self.draining = True

    @property
    def not_ready_reason(self) -> str:
        """The reason, or an empty string if it is ready."""
        if self.draining:
            return "draining"
        if self._connected:
            return ""
        return f"{self._lost}; now: {self._missing}" if self._missing else self._lost
