"""The one error tree. Services raise these; each transport maps them in one place.

::

    TokaError
    ├── InvalidRequest          the caller can mend it: names the field and the fix   INVALID_ARGUMENT     400
    │   ├── PayloadTooLarge                                                           INVALID_ARGUMENT     413
    │   ├── UnsupportedMediaType                                                      INVALID_ARGUMENT     415
    │   └── ReusedIdempotencyKey                                                      INVALID_ARGUMENT     422
    ├── Unauthenticated         no key, or a wrong one                                UNAUTHENTICATED      401
    ├── PermissionDenied        the key, or the web page that asks, may not do this   PERMISSION_DENIED    403
    ├── NotFound                no such model, request, ...                           NOT_FOUND            404
    ├── AlreadyExists           the name or handle is in use                          ALREADY_EXISTS       409
    ├── FailedPrecondition      right call, wrong state                               FAILED_PRECONDITION  409
    ├── Overloaded              the queue is full: says when to come back             RESOURCE_EXHAUSTED   429
    │   └── TooManyBodies       the gateway holds too many bytes of requests          RESOURCE_EXHAUSTED   503
    ├── Unavailable             loading, draining, or a peer is down: try again       UNAVAILABLE          503
    │   └── StoreUnavailable    files, batches and stored objects cannot be reached   UNAVAILABLE          503
    ├── DeadlineExceeded                                                              DEADLINE_EXCEEDED    504
    ├── Cancelled               an operator ended it, not the caller                  CANCELLED            499
    └── Internal                ours: logged with its cause, sent without it          INTERNAL             500

gRPC statuses: ``services.common.rpc.status``. OpenAI errors: ``services.gateway.http.errors``.
Anthropic errors: ``services.gateway.anthropic.errors``.
"""

PEER_LOST_STATUS = 3  # exit status of a worker that could not go on without another of its replica


class TokaError(Exception):
    """Base of everything a service raises on purpose. ``reason`` is a stable, machine-readable token."""

    reason = "ERROR"
    exit_status = 1  # of a process that cannot go on because of it

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason


class InvalidRequest(TokaError):
    """The request is wrong. ``field`` is its path as the caller wrote it, e.g. ``sampling.top_p``; empty when none."""

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str = "", reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.field = field


class PayloadTooLarge(InvalidRequest):
    """The request is larger than the service reads."""

    reason = "PAYLOAD_TOO_LARGE"


class UnsupportedMediaType(InvalidRequest):
    """The request's body is not of the type that the service reads."""

    reason = "UNSUPPORTED_MEDIA_TYPE"


class ReusedIdempotencyKey(InvalidRequest):
    """The key stands for another request."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class Unauthenticated(TokaError):
    """The caller did not show who it is: no credential, or one that is not known."""

    reason = "INVALID_API_KEY"


class PermissionDenied(TokaError):
    """The caller may not do this: its key lacks the scope, or it is a foreign web page."""

    reason = "PERMISSION_DENIED"


class NotFound(TokaError):
    """No such thing. ``field`` names what was looked up."""

    reason = "NOT_FOUND"

    def __init__(self, message: str, *, field: str = "", reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.field = field


class AlreadyExists(TokaError):
    """The name is taken."""

    reason = "ALREADY_EXISTS"


class FailedPrecondition(TokaError):
    """The call is right but the service is in another state than the caller believes."""

    reason = "FAILED_PRECONDITION"


class Overloaded(TokaError):
    """A bounded queue is full. ``retry_after_s`` says when there should be room (seconds)."""

    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: float, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class TooManyBodies(Overloaded):
    """The gateway holds as many bytes of request bodies as it may."""

    reason = "TOO_MANY_BODIES"


class Unavailable(TokaError):
    """The service, or one it needs, cannot answer now; the same call may succeed later."""

    reason = "UNAVAILABLE"


class StoreUnavailable(Unavailable):
    """The gateway's store cannot be read or written now. The log of the gateway has the reason already."""

    reason = "STORE_UNAVAILABLE"


class DeadlineExceeded(TokaError):
    """The request's own deadline passed."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(TokaError):
    """An operator ended the request."""

    reason = "CANCELLED_BY_OPERATOR"


class Internal(TokaError):
    """A defect of ours. The message is safe to show."""

    reason = "INTERNAL"

    @classmethod
    def logged(cls) -> "Internal":
        """In place of an exception whose text is not for clients."""
        return cls("internal error; the server's log has the details")
