"""Authentication and authorization of requests, before their bodies are read."""

from collections.abc import MutableMapping
from typing import Any

import structlog

from services.common.addresses import is_loopback
from services.common.config import GatewayConfig
from services.common.errors import Internal, PermissionDenied, StoreUnavailable, TokaError, Unauthenticated, Unavailable
from services.common.keys import ADMIN, INFERENCE, Key, KeyRing
from services.common.limits import KeyLimits

log = structlog.get_logger(__name__)

# Scope key of an authenticated request: its ``Key``.
KEY = "toka.key"
CONSOLE = "/console"
_AUTHORIZATION, _API_KEY = b"authorization", b"x-api-key"  # the second is Anthropic's


class Guard:
    """Checks API keys and scopes. Runs on the gateway's event loop."""

    def __init__(self, config: GatewayConfig, gateways: int = 1) -> None:
        """Load the keys. ``gateways`` processes share the limits of each key.

        Raises ``InvalidRequest`` for an invalid file of keys.
        """
        self._ring = None if config.api_keys_file is None else KeyRing.load(config.api_keys_file)
        for reason in exposure(config):
            log.warning("exposed", reason=reason)
        self._admin_elsewhere = bool(config.admin_port)
        self.isolates = config.isolate_keys
        self.limits = KeyLimits(gateways)

    def admit(self, scope: MutableMapping[str, Any], needed: str | None) -> None:
        """Authenticate a request. Its key must have the scope ``needed``. None: the request needs no key.

        Raises ``Unauthenticated`` or ``PermissionDenied``.
        """
        if self._ring is None or needed is None:
            return
        key = _find(self._ring, scope)
        if needed not in key.scopes:
            raise PermissionDenied(
                f"this API key has not the scope {needed!r} that {scope['path']} needs; use one that has it",
                reason="INSUFFICIENT_SCOPE",
            )
        scope[KEY] = key

    @property
    def wants_keys(self) -> bool:
        """True if requests need an API key."""
        return self._ring is not None

    def tells_all(self, scope: MutableMapping[str, Any]) -> bool:
        """Return whether a request on the public port may see the state of the replicas."""
        if self._admin_elsewhere:
            return False
        if self._ring is None:
            return True
        try:
            return ADMIN in _find(self._ring, scope).scopes
        except TokaError:
            return False

    def key_named(self, name: str) -> Key | None:
        """Return the key ``name``, whose limits apply to deferred work, or None if authentication is off.

        Raises ``Unauthenticated`` or ``PermissionDenied`` if a request with that key would be rejected now.
        """
        if self._ring is None or not name:
            return None
        self._ring.refresh()
        if (key := self._ring.named(name)) is None:
            raise Unauthenticated("the API key that this was asked with is not known here any more, or has expired")
        if INFERENCE not in key.scopes:
            raise PermissionDenied(
                f"the API key that this was asked with has not the scope {INFERENCE!r} any more",
                reason="INSUFFICIENT_SCOPE",
            )
        return key

    def told(self, error: TokaError) -> TokaError:
        """Return ``error`` as clients see it.

        If authentication is on, only operators see the state and the addresses of schedulers and of the store.
        """
        if self._ring is None or not isinstance(error, (Internal, Unavailable)):
            return error
        if isinstance(error, StoreUnavailable):
            return StoreUnavailable(
                "files, batches and stored responses are not available now; send the request again later, and tell the"
                " operators if that does not help"
            )
        log.warning("not available", reason=error.message)
        what = "it cannot be done now; send it again" if isinstance(error, Unavailable) else "internal error"
        return type(error)(f"{what}; operators are told why", reason=error.reason)


def _find(ring: KeyRing, scope: MutableMapping[str, Any]) -> Key:
    ring.refresh()
    if not (token := presented_key(scope)):
        raise Unauthenticated(
            "this server wants an API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        )
    if (key := ring.find(token)) is None:
        raise Unauthenticated("this API key is not known here, or has expired")
    return key


def presented_key(scope: MutableMapping[str, Any]) -> str:
    """Return the API key of ``Authorization: Bearer``, or of ``x-api-key`` if that header is missing.

    Return an empty string if there is no key, or if a header occurs twice.
    """
    for header, prefix in ((_AUTHORIZATION, "bearer "), (_API_KEY, "")):
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == header]
        if values:
            value = values[0] if len(values) == 1 else ""
            return value[len(prefix) :].strip() if value.lower().startswith(prefix) else ""
    return ""


def exposure(config: GatewayConfig) -> list[str]:
    """Return the reasons why the listening addresses are dangerous."""
    reasons = []
    if not is_loopback(config.host):
        if config.api_keys_file is None:
            reasons.append("other hosts may ask without a key; set api_keys_file=")
        elif config.http_cert is None:
            reasons.append(
                "keys, prompts and answers cross the network unencrypted, unless a proxy in front has TLS; set"
                " http_cert= and http_key="
            )
    if config.admin_port and not is_loopback(config.admin_host):
        reasons.append(f"whoever reaches admin_port={config.admin_port} is an operator; keep others from it")
    return reasons
