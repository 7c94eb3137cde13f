"""Learns how long a step takes, from the tokens that it computes."""

_RECENT = 0.2  # weight of the newest figure in a smoothed one
_APART = 4  # the sizes of two steps differ by this factor before a line is drawn through them
_LEAST_COST, _MOST_COST = 1.0, 4096.0  # tokens


class StepTimes:
    """Smoothed times of steps, by the power of two that their tokens reach. Owned by the step loop."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float]] = {}  # by bit length of the tokens: tokens, seconds

    def note(self, tokens: int, seconds: float) -> None:
        """Take in the time of one step."""
        size = tokens.bit_length()
        known_tokens, known_s = self._sizes.get(size, (tokens, seconds))
        self._sizes[size] = (
            known_tokens + _RECENT * (tokens - known_tokens),
            known_s + _RECENT * (seconds - known_s),
        )

    def expected_s(self, tokens: int) -> float | None:
        """Return the seconds that a step of ``tokens`` takes, or None if no such step was seen."""
        known = self._sizes.get(tokens.bit_length())
        return None if known is None else known[1] * tokens / max(tokens, known[0])

    @property
    def step_cost(self) -> float | None:
        """The fixed time of a step, as the tokens that could be computed in it; None while it is not known."""
        if not self._sizes:
            return None
        (few, short_s), (many, long_s) = self._sizes[min(self._sizes)], self._sizes[max(self._sizes)]
        if many < _APART * few or long_s <= short_s:
            return None
        token_s = (long_s - short_s) / (many - few)
        return min(max(short_s / token_s - few, _LEAST_COST), _MOST_COST)
