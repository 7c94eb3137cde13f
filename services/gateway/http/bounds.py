"""What one request may take: time, and tokens of its key."""

import asyncio
import time
from collections.abc import Sequence

from services.common.errors import DeadlineExceeded
from services.common.limits import DEFAULT_ANSWER_TOKENS, KeyLimits
from services.gateway.engine.generation import Generation
from services.gateway.engine.job import Job
from services.gateway.http.request import Caller

# Schedulers keep deadlines; one that cannot be heard has so long to say so.
_GRACE_S = 1.0


class Bounds:
    """Of one generation: reserved before it begins, settled when it has ended. On the event loop."""

    def __init__(self, limits: KeyLimits, caller: Caller, jobs: Sequence[Job]) -> None:
        """Raises ``TokaError`` when there is no time, or the key has not so many tokens."""
        self._deadline_ms = jobs[0].settings.deadline_ms
        if self._deadline_ms is not None and _left_s(self._deadline_ms) <= 0:
            raise _overdue()
        self._prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        most = self._prompt_tokens + sum(map(_answer_tokens, jobs))
        self._reserved = limits.reserve(caller.key, most) if caller.line is None else caller.line.reserve(most)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, generation: Generation) -> None:
        """Watch over its time."""
        if self._deadline_ms is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_left_s(self._deadline_ms) + _GRACE_S, generation.fail, _overdue())

    def settle(self, generation: Generation) -> None:
        """It has ended, with all its answers or without; to be called before it is closed. Of one that ended in the
        middle nobody knows all that it took: it is taken to be what was reserved, or what came of it if that is more.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reserved is not None:
            took = self._prompt_tokens + generation.made_tokens
            whole = all(choice.ending is not None for choice in generation.choices)
            self._reserved.settle(took if whole else max(took, self._reserved.tokens))

    def give_back(self) -> None:
        """It came to nothing."""
        if self._reserved is not None:
            self._reserved.settle(0)


def _left_s(deadline_ms: int) -> float:
    return deadline_ms / 1000 - time.monotonic()


def _answer_tokens(job: Job) -> int:
    settings = job.settings
    return settings.n * (min(job.max_tokens, DEFAULT_ANSWER_TOKENS) if settings.open_ended else job.max_tokens)


def _overdue() -> DeadlineExceeded:
    return DeadlineExceeded("the request's timeout passed before it was done")
