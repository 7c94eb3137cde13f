import asyncio

import pytest
from structlog.testing import CapturingLogger

from services.common.boundaries import (
    errors_as_internal,
    errors_logged,
    errors_to,
    undo_on_error,
    undo_on_error_async,
)
from services.common.errors import Internal, Unavailable


def test_an_exception_goes_to_the_handler_and_no_further():
    seen: list[Exception] = []
    with errors_to(seen.append):
        raise ValueError("broken")
    assert [str(error) for error in seen] == ["broken"]


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_a_cancellation_and_an_interrupt_are_not_handled_unless_asked_for(error: type[BaseException]):
    seen: list[BaseException] = []
    with pytest.raises(error), errors_to(seen.append):
        raise error
    assert not seen
    with errors_to(seen.append, BaseException):
        raise error
    assert [type(each) for each in seen] == [error]


def test_an_exception_is_logged_with_its_cause():
    log, error = CapturingLogger(), ValueError("broken")
    with errors_logged(log, "a thing failed", id=7):
        raise error
    assert [(call.method_name, call.args, call.kwargs) for call in log.calls] == [
        ("error", ("a thing failed",), {"exc_info": error, "id": 7})
    ]


def test_an_unexpected_exception_is_logged_and_becomes_an_internal_error_without_its_text():
    log = CapturingLogger()
    with pytest.raises(Internal) as raised, errors_as_internal(log, "a thing failed"):
        raise ValueError("secret")
    assert "secret" not in raised.value.message
    assert len(log.calls) == 1


@pytest.mark.parametrize("error", [Unavailable("later"), OSError("gone"), asyncio.CancelledError()])
def test_an_expected_error_passes_unlogged(error: BaseException):
    log = CapturingLogger()
    with pytest.raises(type(error)), errors_as_internal(log, "a thing failed", expected=(OSError,)):
        raise error
    assert not log.calls


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_what_was_done_is_undone_only_after_an_error(error: type[BaseException]):
    undone: list[str] = []

    async def undo(name: str) -> None:
        undone.append(name)

    with undo_on_error(undone.append, "unused"):
        pass
    async with undo_on_error_async(undo, "unused"):
        pass
    with pytest.raises(error), undo_on_error(undone.append, "a"):
        raise error
    with pytest.raises(error):
        async with undo_on_error_async(undo, "b"):
            raise error
    assert undone == ["a", "b"]
