"""Errors that services raise. Each transport converts them in one module.

::

    TokaError
    ├── InvalidRequest          the caller can fix it: names the field and the fix    INVALID_ARGUMENT     400
    │   ├── InvalidValue        a parameter has a value that is not allowed               INVALID_ARGUMENT     400
    │   ├── UnsupportedParameter                                                      INVALID_ARGUMENT     400
    │   ├── InvalidGrammar                                                            INVALID_ARGUMENT     400
    │   ├── PayloadTooLarge                                                           INVALID_ARGUMENT     413
    │   ├── UnsupportedMediaType                                                      INVALID_ARGUMENT     415
    │   └── ReusedIdempotencyKey                                                      INVALID_ARGUMENT     422
    ├── Unauthenticated         no key, or a wrong one                                UNAUTHENTICATED      401
    ├── PermissionDenied        the key or the origin of the page lacks the right      PERMISSION_DENIED    403
    ├── NotFound                no such model, request, ...                           NOT_FOUND            404
    ├── AlreadyExists           the name or handle is in use                          ALREADY_EXISTS       409
    ├── FailedPrecondition      right call, wrong state                               FAILED_PRECONDITION  409
    ├── Overloaded              the queue is full; contains the time to wait          RESOURCE_EXHAUSTED   429
    │   └── TooManyBodies       too many bytes of request bodies in memory            RESOURCE_EXHAUSTED   503
    ├── Unavailable             loading, draining, or a peer is down: retry later     UNAVAILABLE          503
    │   └── StoreUnavailable    files, batches and stored objects are unavailable     UNAVAILABLE          503
    ├── DeadlineExceeded                                                              DEADLINE_EXCEEDED    504
    ├── Cancelled               an operator cancelled the request                     CANCELLED            499
    └── Internal                a defect: logged with its cause, sent without it      INTERNAL             500

gRPC statuses: ``services.common.rpc.status``. OpenAI errors: ``services.gateway.http.errors``.
Anthropic errors: ``services.gateway.anthropic.errors``.
"""

from typing import Self

PEER_LOST_STATUS = 3  # exit status of a worker that lost another worker of its replica


class TokaError(Exception):
    """Base of the errors that services raise on purpose. ``reason`` is a stable identifier for programs.

    ``field`` is the path of the wrong parameter as in the request, for example ``sampling.top_p``, or empty.
    """

    reason = "ERROR"
    exit_status = 1  # of a process that exits because of the error

    def __init__(self, message: str, *, field: str = "", reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        if reason is not None:
            self.reason = reason


class InvalidRequest(TokaError):
    """The request is wrong."""

    reason = "INVALID_REQUEST"

    @classmethod
    def at(cls, field: str, problem: str, *, reason: str | None = None) -> Self:
        """Return the error whose message is the name of ``field`` and the ``problem``."""
        return cls(f"{field}: {problem}", field=field, reason=reason)


class InvalidValue(InvalidRequest):
    """A parameter has a value that is not allowed."""

    reason = "INVALID_VALUE"


class UnsupportedParameter(InvalidRequest):
    """A parameter or its value is valid elsewhere, but not supported by this server or this model."""

    reason = "UNSUPPORTED_PARAMETER"


class InvalidGrammar(InvalidRequest):
    """A grammar, such as a JSON Schema, cannot be enforced."""

    reason = "INVALID_GRAMMAR"


class PayloadTooLarge(InvalidRequest):
    """The request is larger than the service accepts."""

    reason = "PAYLOAD_TOO_LARGE"


class UnsupportedMediaType(InvalidRequest):
    """The service does not support the media type of the request's body."""

    reason = "UNSUPPORTED_MEDIA_TYPE"


class ReusedIdempotencyKey(InvalidRequest):
    """The idempotency key was used for another request."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class Unauthenticated(TokaError):
    """The caller has no credential, or an unknown one."""

    reason = "INVALID_API_KEY"


class PermissionDenied(TokaError):
    """The caller may not do this: its key lacks the scope, or it is a web page of another origin."""

    reason = "PERMISSION_DENIED"


class NotFound(TokaError):
    """The requested object does not exist. ``field`` names the parameter with its name."""

    reason = "NOT_FOUND"


class AlreadyExists(TokaError):
    """The name is in use."""

    reason = "ALREADY_EXISTS"


class FailedPrecondition(TokaError):
    """The call is valid, but not in the current state of the service."""

    reason = "FAILED_PRECONDITION"


class Overloaded(TokaError):
    """A limit is reached, such as that of a queue. The caller should retry after ``retry_after_s`` seconds."""

    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: float, field: str = "", reason: str | None = None) -> None:
        super().__init__(message, field=field, reason=reason)
        self.retry_after_s = retry_after_s


class TooManyBodies(Overloaded):
    """The bytes of request bodies in the gateway have reached their limit."""

    reason = "TOO_MANY_BODIES"


class Unavailable(TokaError):
    """The service, or a service that it needs, cannot respond now. The same call may succeed later."""

    reason = "UNAVAILABLE"


class StoreUnavailable(Unavailable):
    """The gateway's store cannot be read or written now. The gateway has already logged the reason."""

    reason = "STORE_UNAVAILABLE"


class DeadlineExceeded(TokaError):
    """The request's deadline has passed."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(TokaError):
    """An operator cancelled the request."""

    reason = "CANCELLED_BY_OPERATOR"

    @classmethod
    def by_operator(cls) -> "Cancelled":
        """Return the error of a client whose request an operator cancelled."""
        return cls("an operator ended this request")


class Internal(TokaError):
    """A defect of the service. The message contains no user data."""

    reason = "INTERNAL"

    @classmethod
    def logged(cls) -> "Internal":
        """Return the error that replaces an exception whose text must not be sent to clients."""
        return cls("internal error; the server's log has the details")
