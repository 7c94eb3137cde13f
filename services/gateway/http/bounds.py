"""The deadline and the token budget of one request."""

import asyncio
import time
from collections.abc import Sequence

from services.common.errors import DeadlineExceeded
from services.common.limits import DEFAULT_ANSWER_TOKENS, KeyLimits
from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.request import PromptRequest
from services.gateway.http.request import Caller

# Schedulers enforce deadlines. The gateway fails a request this time later if its scheduler does not.
_GRACE_S = 1.0


class Bounds:
    """The deadline and the reserved tokens of one request. Runs on the event loop."""

    def __init__(self, limits: KeyLimits, caller: Caller, prompts: Sequence[PromptRequest]) -> None:
        """Reserve tokens before the request starts.

        Raises ``TokaError`` if the deadline has passed or the key's budget is too small.
        """
        self._deadline_ms = prompts[0].settings.deadline_ms
        if self._deadline_ms is not None and _left_s(self._deadline_ms) <= 0:
            raise _overdue()
        self._prompt_tokens = sum(len(prompt.prompt_ids) for prompt in prompts)
        most = self._prompt_tokens + sum(map(_answer_tokens, prompts))
        self._reserved = limits.reserve(caller.key, most) if caller.line is None else caller.line.reserve(most)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request: ActiveRequest) -> None:
        """Start the timer of the deadline."""
        if self._deadline_ms is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_left_s(self._deadline_ms) + _GRACE_S, request.fail, _overdue())

    def settle(self, request: ActiveRequest) -> None:
        """Charge the key for a request that has ended. Called before the request is closed.

        If a sample did not finish, charge the larger of the reserved and the generated tokens.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reserved is not None:
            used = self._prompt_tokens + request.generated_tokens
            complete = all(sample.ending is not None for sample in request.samples)
            self._reserved.settle(used if complete else max(used, self._reserved.tokens))

    def give_back(self) -> None:
        """Return all reserved tokens of a request that was not run."""
        if self._reserved is not None:
            self._reserved.settle(0)


def _left_s(deadline_ms: int) -> float:
    return deadline_ms / 1000 - time.monotonic()


def _answer_tokens(prompt: PromptRequest) -> int:
    settings = prompt.settings
    return settings.n * (min(prompt.max_tokens, DEFAULT_ANSWER_TOKENS) if settings.open_ended else prompt.max_tokens)


def _overdue() -> DeadlineExceeded:
    return DeadlineExceeded("the request's timeout passed before it was done")
