"""A clock that stands still until a test moves it."""


class Clock:
    """Seconds, as ``time.monotonic`` tells them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
