"""Converts errors to gRPC statuses with google.rpc details, and back."""

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import errors

DOMAIN = "tokasaurus"

# The first match counts, so subclasses precede their bases.
_CODES: tuple[tuple[type[errors.TokaError], int], ...] = (
    (errors.InvalidRequest, code_pb2.INVALID_ARGUMENT),
    (errors.Unauthenticated, code_pb2.UNAUTHENTICATED),
    (errors.PermissionDenied, code_pb2.PERMISSION_DENIED),
    (errors.NotFound, code_pb2.NOT_FOUND),
    (errors.AlreadyExists, code_pb2.ALREADY_EXISTS),
    (errors.FailedPrecondition, code_pb2.FAILED_PRECONDITION),
    (errors.Overloaded, code_pb2.RESOURCE_EXHAUSTED),
    (errors.Unavailable, code_pb2.UNAVAILABLE),
    (errors.DeadlineExceeded, code_pb2.DEADLINE_EXCEEDED),
    (errors.Cancelled, code_pb2.CANCELLED),
    (errors.TokaError, code_pb2.INTERNAL),
)
_KINDS = {code: kind for kind, code in _CODES[:-1]} | {code_pb2.OUT_OF_RANGE: errors.InvalidRequest}


def to_status(error: errors.TokaError) -> status_pb2.Status:
    """Return a ``google.rpc.Status`` with ErrorInfo and, if they apply, BadRequest and RetryInfo."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    status = status_pb2.Status(code=code, message=error.message)
    field = error.field
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata={"field": field} if field else {})
    _attach(status, info)
    if isinstance(error, errors.InvalidRequest) and field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=error.message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, errors.Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> errors.TokaError:
    """Return the error from which ``to_status`` made ``status``, as far as the status describes it."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info)  # has no effect for a detail of another type
        detail.Unpack(retry)
    message, reason, field = status.message, info.reason or None, info.metadata.get("field", "")
    if status.code == code_pb2.RESOURCE_EXHAUSTED:
        delay = retry.retry_delay.ToTimedelta().total_seconds()
        return errors.Overloaded(message, retry_after_s=delay or 1.0, field=field, reason=reason)
    kind = _KINDS.get(status.code, errors.Internal)
    if kind is errors.InvalidRequest and reason == errors.PayloadTooLarge.reason:
        kind = errors.PayloadTooLarge
    if kind is errors.Cancelled and reason != errors.Cancelled.reason:  # gRPC itself uses the code for lost calls
        kind = errors.Internal
    return kind(message, field=field, reason=reason)


def from_rpc_error(error: grpc.RpcError) -> errors.TokaError:
    """Return the ``TokaError`` of a failed call.

    A status without readable details, such as that of a lost connection, keeps its code and message.
    """
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # gRPC's errors are calls too
    except (DecodeError, ValueError):  # malformed details, or details that contradict the status
        status = None
    if status is None:
        status = status_pb2.Status(code=error.code().value[0], message=error.details() or error.code().name)
    return from_status(status)


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
