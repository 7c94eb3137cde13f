"""Requests of all streams whose grammars are being checked. The core does not have them yet."""

import asyncio
import time
from collections.abc import Callable, Collection

import structlog

from services.common.errors import Cancelled
from services.common.request_ids import is_chosen
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.grammar.checker import GrammarChecker

log = structlog.get_logger(__name__)

_AFTER_DEADLINE_S = 0.01  # margin after which a request is overdue by any clock


class UncheckedRequests:
    """Registry of requests whose grammars are being checked. A request that is aborted ends after its check.

    Used on the event loop.
    """

    def __init__(self) -> None:
        self._endings: dict[Request, FinishReason | None] = {}  # the reason for which each must end, if any

    def add(self, request: Request) -> None:
        """Add a request whose ``check`` follows later. ``remove`` it when the check is over, or was not begun."""
        self._endings[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request, if it is still there."""
        self._endings.pop(request, None)

    async def check(self, grammar_checker: GrammarChecker, request: Request, name: str) -> bool:
        """Check the grammar of ``request``, called ``name`` in errors. Return whether it was aborted meanwhile.

        The caller submits an aborted request, and then ends its samples. Raises as ``GrammarChecker.check`` does, and
        ``Cancelled``. It also returns at the request's deadline. A request that is submitted then ends as overdue.
        """
        client, left = (request.fairness_key, request.sink), None
        if request.deadline_ms is not None:
            left = request.deadline_ms / 1000 - time.monotonic() + _AFTER_DEADLINE_S
        self._endings.setdefault(request, None)
        try:
            await asyncio.wait_for(grammar_checker.check(request.sampling.grammar, name, client), left)
        except TimeoutError:
            log.info("a request's deadline passed before its grammar was checked", request_id=request.request_id)
        finally:
            ending = self._endings.pop(request)
        if ending is FinishReason.CANCELLED:
            raise Cancelled.by_operator()
        return ending is FinishReason.ABORTED

    def abort(self, request_ids: Collection[str] | None) -> int:
        """Abort requests. Return the number of their samples. ``request_ids`` is as for ``is_chosen``.

        Here and in ``cancel``, requests that end anyway are left as they are.
        """
        return self._end(FinishReason.ABORTED, lambda request: is_chosen(request.request_id, request_ids))

    def cancel(self, request_id: str) -> int:
        """Cancel a request for an operator. Return the number of its samples."""
        return self._end(FinishReason.CANCELLED, lambda request: request.request_id == request_id)

    def _end(self, reason: FinishReason, is_meant: Callable[[Request], bool]) -> int:
        requests = [request for request, ending in self._endings.items() if ending is None and is_meant(request)]
        self._endings |= dict.fromkeys(requests, reason)
        return sum(request.n for request in requests)
