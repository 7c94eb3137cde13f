"""Where one sequence stands in its grammar."""

import time
from concurrent.futures import CancelledError, Future

from llguidance import LLMatcher

from services.common.errors import InvalidRequest
from services.worker.step.output import Failure

FORBIDDEN_TOKENS = "FORBIDDEN_TOKENS"  # reason of an ``InvalidRequest``: the grammar does not allow what was generated


class Follower:
    """Used by one thread at a time."""

    def __init__(self, matcher: "Future[LLMatcher | None]") -> None:
        """``matcher``: behind what was generated before the admission; None = that ended the sequence."""
        self._matcher: Future[LLMatcher | None] | None = matcher  # None = any token may come
        self._known: LLMatcher | None = None  # the same, once it was there
        self.failure: Failure | None = None  # why the grammar cannot be followed any more
        self.watched = 0  # how often it is still looked at how long it takes

    def matcher(self, until: float | None = None) -> LLMatcher | None:
        """Waits for it, and fails at ``until``, by ``time.monotonic``. None where any token may come: the sequence has
        ended, or failed."""
        if self._known is not None or self._matcher is None:
            return self._known
        try:
            patience = None if until is None or self._matcher.done() else max(0.0, until - time.monotonic())
            matcher = self._matcher.result(patience)
        except InvalidRequest as error:
            self.fail(str(error), forbidden=error.reason == FORBIDDEN_TOKENS)
            return None
        except (TimeoutError, CancelledError):
            self.fail("it was not compiled in time; try again")
            return None
        if matcher is None:
            self.let_go()
        self._known = matcher
        return matcher

    def let_go(self) -> None:
        """Any token may come from here on."""
        if self._matcher is not None:
            self._matcher.cancel()
        self._matcher = self._known = None

    def fail(self, reason: str, *, forbidden: bool = False) -> None:
        """The sequence cannot be continued; ``forbidden``: as in ``Failure``."""
        said = " ".join(reason.removesuffix("<non-verbose/>").split())
        self.failure = Failure(f"the grammar cannot be followed: {said}", forbidden)
        self.let_go()
