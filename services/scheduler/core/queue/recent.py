"""Recent service of each fairness key."""

from collections.abc import Iterable

_WINDOW, _WINDOW_OF_A_KEY = 16, 32  # full steps that count as recent, and further steps for each key
_LEAST = 1 / 1000  # part of a full step; a key with fewer tokens than this, and than one, is dropped


class RecentService:
    """Tokens computed for each key while several keys had requests. Old tokens fade. Owned by the core."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._since = 0  # tokens since the last reduction of all keys

    def charge(self, tokens: dict[str, int], full: int) -> None:
        """Count the tokens that a plan computes for each key. ``full`` is the most tokens of a step."""
        for key, count in tokens.items():
            self._tokens[key] = self._tokens.get(key, 0.0) + count
        self._since += sum(tokens.values())
        if self._since >= full:
            kept = (1 - 1 / (_WINDOW + _WINDOW_OF_A_KEY * len(self._tokens))) ** (self._since / full)
            least = min(1.0, full * _LEAST)
            self._tokens = {key: count * kept for key, count in self._tokens.items() if count * kept >= least}
            self._since = 0

    def behind(self, keys: Iterable[str], part: float = 0.5) -> set[str]:
        """Return the keys that got at most ``part`` of an equal share of the recent service of ``keys``."""
        tokens = {key: self._tokens.get(key, 0.0) for key in keys}
        share = sum(tokens.values()) / max(1, len(tokens))
        return {key for key, count in tokens.items() if count <= part * share}
