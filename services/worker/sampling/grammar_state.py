"""State of one sequence in its grammar."""

import time
from concurrent.futures import CancelledError, Future

from llguidance import LLMatcher

from services.common.errors import InvalidRequest
from services.worker.step.output import Failure

# Reason of an ``InvalidRequest``: the grammar does not allow the tokens generated before the admission.
FORBIDDEN_TOKENS = "FORBIDDEN_TOKENS"


class GrammarState:
    """Position of one sequence in its grammar, or the reason why the sequence fails. Used by one thread at a time."""

    def __init__(self, matcher: "Future[LLMatcher | None]") -> None:
        """``matcher`` has consumed the tokens generated before the admission; None if these ended the sequence."""
        self._pending: Future[LLMatcher | None] | None = matcher  # None = the sequence is unconstrained
        self._matcher: LLMatcher | None = None  # result of ``_pending``
        self.failure: Failure | None = None
        self.timed_calls = 0  # number of further calls that are timed alone, see ``call_timed``

    def matcher(self, deadline: float) -> LLMatcher | None:
        """Return the matcher, or None if the sequence has ended or failed and so is unconstrained.

        Blocks until the grammar is compiled. At ``deadline``, by ``time.monotonic``, the sequence fails.
        """
        if self._matcher is not None or self._pending is None:
            return self._matcher
        try:
            matcher = self._pending.result(max(0.0, deadline - time.monotonic()))
        except InvalidRequest as error:
            self.fail(str(error), forbidden=error.reason == FORBIDDEN_TOKENS)
            return None
        except (TimeoutError, CancelledError):
            self.fail("it was not compiled in time; try again")
            return None
        if matcher is None:
            self.release()
        self._matcher = matcher
        return matcher

    def release(self) -> None:
        """Drop the matcher, so that any token may follow."""
        if self._pending is not None:
            self._pending.cancel()
        self._pending = self._matcher = None

    def fail(self, reason: str, *, forbidden: bool = False) -> None:
        """Record that the sequence fails because of ``reason``. ``forbidden`` is as in ``Failure``."""
        text = " ".join(reason.removesuffix("<non-verbose/>").split())
        self.failure = Failure(f"the grammar cannot be followed: {text}", forbidden)
        self.release()
