"""Boundaries between code that may fail in any way and code that must go on.

Threads, background tasks and handlers of calls catch exceptions of any kind with these context managers.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, ParamSpec, Protocol

from services.common.errors import Internal, TokaError

P = ParamSpec("P")


class Log(Protocol):
    """A structured logger."""

    def error(self, event: str, **fields: Any) -> Any: ...


class errors_to:
    """Context manager that calls ``handle`` with an exception of its block instead of raising it.

    ``kinds=BaseException`` is for threads, where no caller gets the exception, and for panics of Rust libraries.
    """

    __slots__ = ("_handle", "_kinds")

    def __init__(self, handle: Callable[[Any], object], kinds: type[BaseException] = Exception) -> None:
        self._handle = handle
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, self._kinds):
            return False
        self._handle(error)
        return True


def errors_logged(log: Log, event: str, **fields: Any) -> errors_to:
    """Return a context manager that logs an exception of its block as ``event`` instead of raising it."""
    return errors_to(lambda error: log.error(event, exc_info=error, **fields))


class errors_as_internal:
    """Context manager that logs an unexpected exception of its block as ``event`` and raises ``Internal`` instead.

    ``TokaError`` and the types in ``expected`` pass.
    """

    __slots__ = ("_event", "_expected", "_fields", "_log")

    def __init__(self, log: Log, event: str, *, expected: tuple[type[BaseException], ...] = (), **fields: Any) -> None:
        self._log = log
        self._event = event
        self._expected: tuple[type[BaseException], ...] = (TokaError, *expected)
        self._fields = fields

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._expected):
            self._log.error(self._event, exc_info=error, **self._fields)
            raise Internal.logged() from error


@contextlib.contextmanager
def undo_on_error(undo: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
    """Call ``undo`` if the block raises. The exception goes on."""
    try:
        yield
    except BaseException:
        undo(*args, **kwargs)
        raise


@contextlib.asynccontextmanager
async def undo_on_error_async(
    undo: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs
) -> AsyncIterator[None]:
    """Await ``undo`` if the block raises. The exception goes on."""
    try:
        yield
    except BaseException:
        await undo(*args, **kwargs)
        raise
