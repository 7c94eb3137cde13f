"""Finds the request that schedulers die of, without giving up those that were beside it."""

from collections.abc import Container

from services.gateway.generation import Call, Choice

SUSPICIOUS, PROVEN = 2, 3  # schedulers lost with a sample, without a token of it in between
_TRIAL_S = 1.0  # who has done no harm for so long is through


class Trial:
    """Owned by ``Failover``. A suspect, a call with a sample that lost ``SUSPICIOUS`` schedulers, is sent only when
    this admits it: one at first, one more at a time for each that does no harm, and an eighth of them after a loss. Who
    is alone when the next one is lost is found out. Times are of ``time.monotonic``.
    """

    def __init__(self) -> None:
        self._on: dict[Call, float] = {}  # sent, and when
        self._most = 1

    def admits(self, call: Call, now: float) -> bool:
        """Whether ``call`` may be sent."""
        if max(choice.setbacks for choice in call.choices) < SUSPICIOUS:
            return True
        self._let_go(now)
        return len(self._on) < self._most

    def sent(self, call: Call, now: float) -> None:
        """``call`` is at a scheduler."""
        if max(choice.setbacks for choice in call.choices) >= SUSPICIOUS:
            self._on[call] = now

    def forget(self, call: Call) -> None:
        """It was refused."""
        self._on.pop(call, None)

    def lost(self, choices: Container[Choice]) -> Call | None:
        """A scheduler is lost with ``choices``, whose setbacks were counted: the call that is found out, if any."""
        alone = len(self._on) == 1
        met = [call for call in self._on if any(choice in choices for choice in call.choices)]
        if not met:
            return None
        self._most = max(1, len(self._on) // 8)
        for call in met:
            del self._on[call]
        guilty = alone and max(choice.setbacks for choice in met[0].choices) >= PROVEN
        return met[0] if guilty else None

    def _let_go(self, now: float) -> None:
        for call, since in list(self._on.items()):
            through = any(choice.setbacks == 0 or choice.ending is not None for choice in call.choices)
            if through or now - since >= _TRIAL_S or not call.generation.calls:
                del self._on[call]
                self._most += 1
