"""Finds the request that schedulers die of, without giving up those that were beside it."""

from collections.abc import Collection

from services.gateway.engine.generation import Call, Choice

SUSPICIOUS = 2  # setbacks of a sample without a token in between
PROVEN = 3  # more schedulers lost with a suspect, and with no other one
_TRIAL_S = 1.0  # who has done no harm for so long makes room for the next one


class Trial:
    """Owned by ``Failover``. Suspects are samples that had ``SUSPICIOUS`` setbacks and no token since; a call with one
    is sent only when this admits it: one at first, one more at a time for each that does no harm, and an eighth of
    them after a loss. Times are of ``time.monotonic``.

    Schedulers are also lost for reasons of their own: somebody innocent would have to be met by five such losses in a
    row, without a token in between, and be the only suspect there at three of them.
    """

    def __init__(self) -> None:
        self._on: dict[Call, float] = {}  # sent, and when
        self._most = 1

    @property
    def busy(self) -> bool:
        """Somebody is to be let go, sooner or later."""
        return bool(self._on)

    def admits(self, call: Call) -> bool:
        """Whether ``call`` may be sent."""
        return len(self._on) < self._most or not any(map(_is_suspect, call.choices))

    def sent(self, call: Call, now: float) -> None:
        """``call`` is at a scheduler."""
        if any(map(_is_suspect, call.choices)):
            self._on[call] = now

    def forget(self, call: Call) -> None:
        """It was refused."""
        self._on.pop(call, None)

    def let_go(self, now: float) -> None:
        """Of those that have done no harm."""
        for call, since in list(self._on.items()):
            cleared = not all(map(_is_suspect, call.choices))
            if cleared or now - since >= _TRIAL_S or not call.generation.calls:
                del self._on[call]
                self._most += 1

    def lost(self, choices: Collection[Choice]) -> list[Choice]:
        """A scheduler is lost with ``choices``; returns those that it has died of."""
        suspects = [choice for choice in choices if _is_suspect(choice)]
        for choice in choices:
            choice.setbacks += 1  # until its next token
        if met := [call for call in self._on if any(choice in choices for choice in call.choices)]:
            self._most = max(1, len(self._on) // 8)
            for call in met:
                del self._on[call]
        if len({(choice.generation, choice.prompt_index) for choice in suspects}) == 1:
            for choice in suspects:
                choice.strikes += 1
        return [choice for choice in suspects if choice.strikes >= PROVEN]


def _is_suspect(choice: Choice) -> bool:
    return choice.setbacks >= SUSPICIOUS and choice.ending is None
