"""How much was computed for each fairness key lately."""

from collections.abc import Iterable

_WINDOW, _WINDOW_OF_A_KEY = 16, 32  # full steps that "lately" means, and how many more for each key
_LEAST = 1 / 1000  # of a full step, and a token at most: a key with less is forgotten


class RecentService:
    """Tokens computed for each key while requests of several keys were there; older ones fade. Owned by the core."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._since = 0  # tokens since the others were reduced last

    def charge(self, tokens: dict[str, int], full: int) -> None:
        """Count what a plan computes for each key. ``full``: the most tokens of a step."""
        for key, count in tokens.items():
            self._tokens[key] = self._tokens.get(key, 0.0) + count
        self._since += sum(tokens.values())
        if self._since >= full:
            kept = (1 - 1 / (_WINDOW + _WINDOW_OF_A_KEY * len(self._tokens))) ** (self._since / full)
            least = min(1.0, full * _LEAST)
            self._tokens = {key: count * kept for key, count in self._tokens.items() if count * kept >= least}
            self._since = 0

    def behind(self, keys: Iterable[str]) -> set[str]:
        """Return those of ``keys`` that got less than half of an equal share of the service of all of them."""
        tokens = {key: self._tokens.get(key, 0.0) for key in keys}
        share = sum(tokens.values()) / max(1, len(tokens))
        return {key for key, count in tokens.items() if count <= share / 2}
