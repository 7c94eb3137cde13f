"""Authorises calls of the public service."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from services.common.addresses import is_public
from services.common.config import SchedulerConfig
from services.common.errors import PermissionDenied, TokaError, Unauthenticated
from services.common.keys import ADMIN, INFERENCE, Key, KeyRing, salted
from services.common.limits import KeyLimits
from services.common.rpc.interceptor import Details, Handler
from services.common.rpc.token import TokenFile
from tokasaurus.scheduler.v1 import generate_pb2

Metadata = Iterable[tuple[str, str | bytes]]

_SERVICE = "/tokasaurus.scheduler.v1.SchedulerService/"
_SESSION = f"{_SERVICE}Session"  # carries requests of any key
# The other methods concern requests of all keys.
_CONTROL = ("Pause", "Resume", "AbortRequests", "ResetPrefixCache", "Sleep", "Wake")
_WEIGHTS = (
    "StageWeights",
    "UploadWeights",
    "CommitWeights",
    "DiscardWeights",
    "GetWeights",
    "ReadTensor",
    "LeaseUpdates",
)
_BROADCASTS = ("JoinUpdateGroup", "LeaveUpdateGroup", "ReceiveWeights", "CopySharedWeights")
_VIEWS = ("ListRequests", "CancelRequest", "WatchPlans")
_OF_ADMINS = frozenset({_SESSION} | {f"{_SERVICE}{name}" for name in _VIEWS + _CONTROL + _WEIGHTS + _BROADCASTS})
_OPEN = "/grpc.health.v1.Health/"
_AUTHORIZATION = "authorization"


class Access(grpc.aio.ServerInterceptor):
    """Refuses calls without the right before their first message is read. Used on the event loop.

    An API key allows what its scopes say. The token of ``grpc_token_file`` belongs to the gateways and allows
    everything. Without such a token, a client certificate allows sessions if the port requires one.
    """

    def __init__(
        self,
        ring: KeyRing | None = None,
        token: TokenFile | None = None,
        *,
        certified: bool = False,
        isolates: bool = False,
    ) -> None:
        """Create the interceptor. Without keys and token, all calls are allowed.

        ``certified`` means that the port requires client certificates.
        """
        self._ring = ring
        self._token = token
        self._sessions_open = certified and token is None
        self._isolates = isolates
        self.limits = KeyLimits()

    @classmethod
    def of(cls, config: SchedulerConfig) -> "Access":
        """Load the files of ``config``. Raises ``InvalidRequest`` if one cannot be used."""
        return cls(
            None if config.api_keys_file is None else KeyRing.load(config.api_keys_file),
            TokenFile.of(config.grpc_token_file),
            certified=config.has_mutual_tls and not config.scheduler_listen.startswith("unix:"),
            isolates=config.isolate_keys,
        )

    async def intercept_service(
        self, continuation: "Callable[[Details], Awaitable[Handler | None]]", handler_call_details: Details
    ) -> "Handler | None":
        try:
            self.check(handler_call_details.method, handler_call_details.invocation_metadata)
        except TokaError as error:
            return _refusing(error)
        return await continuation(handler_call_details)

    def check(self, method: str, metadata: Metadata) -> None:
        """Check that a call of ``method`` is allowed. Raises ``Unauthenticated`` or ``PermissionDenied``."""
        if not self._restricted or method.startswith(_OPEN) or (method == _SESSION and self._sessions_open):
            return
        presented = _presented(metadata)
        if self._is_service(presented):
            return
        key = self._find(presented)
        needed = ADMIN if method in _OF_ADMINS else INFERENCE
        if needed not in key.scopes and method.startswith(_SERVICE):  # every key may use reflection
            raise PermissionDenied(
                f"this API key has not the scope {needed!r} that {method} needs; use one that has it",
                reason="INSUFFICIENT_SCOPE",
            )

    def key_of(self, metadata: Metadata) -> Key | None:
        """Return the key of an allowed call, or None if the call has the gateways' token or needs no key."""
        if not self._restricted or self._is_service(presented := _presented(metadata)):
            return None
        return self._find(presented)

    def sign(self, request: generate_pb2.GenerateRequest, key: Key | None) -> None:
        """Write the owner of ``request`` into it."""
        if key is not None:
            request.fairness_key = key.name
            if self._isolates:
                request.cache_salt = salted(key.name, request.cache_salt)

    @property
    def _restricted(self) -> bool:
        return self._ring is not None or self._token is not None

    def _is_service(self, presented: str) -> bool:
        return self._token is not None and self._token.matches(presented)

    def _find(self, presented: str) -> Key:
        if self._ring is not None:
            self._ring.refresh()
            if (key := self._ring.find(presented)) is not None:
                return key
        raise Unauthenticated("this API key is not known here, or has expired")


def _presented(metadata: Metadata) -> str:
    values = [value for name, value in metadata if name == _AUTHORIZATION and isinstance(value, str)]
    scheme, _, secret = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthenticated("this server wants an API key: send the metadata 'authorization: Bearer KEY'")
    return secret.strip()


def _refusing(error: TokaError) -> Handler:
    """Return a handler that ends a call of any kind with ``error`` without reading its messages."""

    async def refuse(requests: Any, context: Any) -> Any:
        raise error
        yield

    return grpc.stream_stream_rpc_method_handler(refuse)


def exposure(config: SchedulerConfig) -> str:
    """Return a warning about the listen address, or an empty string if it is safe."""
    if not is_public(config.scheduler_listen):
        return ""
    if config.api_keys_file is None and config.grpc_token_file is None and not config.has_mutual_tls:
        return "other hosts may call without credentials; set api_keys_file=, or grpc_cert=, grpc_key= and grpc_ca="
    if config.grpc_cert is None:
        return "keys, prompts and answers cross the network unencrypted; set grpc_cert= and grpc_key="
    return ""
