"""Predicts the duration of a step from its number of tokens."""

_RECENT = 0.2  # weight of the newest value in a smoothed value
_LEAST_RATIO = 4  # of the sizes of two steps, for a linear fit
_LEAST_COST, _MOST_COST = 1.0, 4096.0  # tokens


class StepTimes:
    """Smoothed durations of steps, grouped by the bit length of their tokens. Used by the step loop."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float]] = {}  # by bit length of the tokens: tokens, seconds
        self.step_cost: float | None = None  # fixed time of a step, in tokens computed in that time; None if unknown

    def note(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        size = tokens.bit_length()
        known_tokens, known_s = self._sizes.get(size, (tokens, seconds))
        self._sizes[size] = (
            known_tokens + _RECENT * (tokens - known_tokens),
            known_s + _RECENT * (seconds - known_s),
        )
        self.step_cost = self._fit()

    def expected_s(self, tokens: int) -> float | None:
        """Return the expected duration of a step of ``tokens``, or None if no such step was recorded."""
        known = self._sizes.get(tokens.bit_length())
        if known is None:
            return None
        known_tokens, known_s = known
        if self.step_cost is None:
            return known_s * tokens / max(tokens, known_tokens)
        return known_s * (tokens + self.step_cost) / (known_tokens + self.step_cost)

    def _fit(self) -> float | None:
        (few, short_s), (many, long_s) = self._sizes[min(self._sizes)], self._sizes[max(self._sizes)]
        if many < _LEAST_RATIO * few or long_s <= short_s:
            return None
        token_s = (long_s - short_s) / (many - few)
        return min(max(short_s / token_s - few, _LEAST_COST), _MOST_COST)
