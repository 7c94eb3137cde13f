"""Protection of ports without API keys from requests of foreign web pages.

A page can make its visitor's browser send requests to addresses that only the visitor's host can reach. If a key is
required, the page does not have it. Otherwise the request's headers must show that the page may send it.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

from services.common.allowed_hosts import AllowedHosts
from services.common.config import GatewayConfig
from services.common.errors import PermissionDenied
from services.gateway.http.guard import CONSOLE

# Probes with constant responses. A host name that is missing in a flag must not make a supervisor restart the process.
_UNCHECKED = frozenset({"/health", "/ping"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_UNSAFE_PATHS = frozenset({"/flush_cache"})  # GET has an effect
# Values of Sec-Fetch-Site, which browsers send to HTTPS and loopback addresses. The first means that the page has the
# server's origin, the second that the user sent the request.
_OWN_SITE = (b"same-origin", b"none")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MAX_SHOWN = 100  # characters of a header in an error message


class WebPages:
    """Rejects requests that a foreign web page makes a browser send."""

    def __init__(self, hosts: AllowedHosts | None, origins: Sequence[str] = ()) -> None:
        """Create the check. ``origins`` is ``cors_origins``. ``hosts`` is None with HTTPS, which proves the name."""
        self._hosts = hosts
        self._origins = frozenset(origins)

    @classmethod
    def public(cls, config: GatewayConfig) -> "WebPages | None":
        """Return the check of ``port``, or None if it requires keys."""
        if config.api_keys_file is not None:
            return None
        hosts = AllowedHosts(config.host, config.allowed_hosts) if config.http_cert is None else None
        return cls(hosts, config.cors_origins)

    @classmethod
    def admin(cls, config: GatewayConfig) -> "WebPages":
        """Return the check of ``admin_port``, which requires no key."""
        return cls(AllowedHosts(config.admin_host, config.allowed_hosts))

    def check(self, scope: MutableMapping[str, Any]) -> None:
        """Raise PermissionDenied for a foreign host name, or for a request of a foreign page.

        A foreign page may send GET, HEAD and OPTIONS, but not to the console or to a path where GET has an effect.
        """
        path, headers = scope["path"], scope["headers"]
        if path in _UNCHECKED:
            return
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if self._hosts is not None:
            for host in hosts:
                if not self._hosts.allows(host):
                    raise _foreign_host(host)
        safe = scope["method"] in _SAFE_METHODS and path not in _UNSAFE_PATHS
        console = path.startswith(f"{CONSOLE}/")
        if console or not safe:
            self._check_page(dict(headers), hosts, safe=safe, console=console)

    def _check_page(self, sent: dict[bytes, bytes], hosts: Sequence[str], *, safe: bool, console: bool) -> None:
        """Raise PermissionDenied unless the headers ``sent`` are from the server's own page or from a listed origin."""
        origin, site = sent.get(b"origin", b"").decode("latin-1"), sent.get(b"sec-fetch-site", b"")
        if not (origin or site) or site in _OWN_SITE:
            return
        if origin:
            listed = not console and not self._origins.isdisjoint(("*", origin))
            foreign = not listed and not _is_own(origin, hosts)
        else:  # a page with a link cannot read the response
            foreign = not (safe and sent.get(b"sec-fetch-mode") == b"navigate")
        if foreign:
            raise _foreign_page(origin, console=console)


def _is_own(origin: str, hosts: Sequence[str]) -> bool:
    """Return whether ``origin`` is this server, as the request's ``Host`` names it. A proxy may have added TLS."""
    scheme, _, authority = origin.lower().partition("://")
    names = (authority, f"{authority}:{_DEFAULT_PORTS.get(scheme, '')}")
    return any(host.lower() in names for host in hosts)


def _foreign_host(host: str) -> PermissionDenied:
    name = host[:_MAX_SHOWN].rpartition(":")[0] or host[:_MAX_SHOWN]
    return PermissionDenied(
        f"this server is not known as {name!r}, so the request may come from a web page that took over its address; if"
        f" this is a name of the server, start it with allowed_hosts={name}, or with api_keys_file=",
        reason="HOST_NOT_ALLOWED",
    )


def _foreign_page(origin: str, *, console: bool) -> PermissionDenied:
    page = f"a web page of {origin[:_MAX_SHOWN]!r}" if origin else "a web page of another site"
    if console:
        fix = "only the console's own page may; a proxy in front of the server must pass the Host header on"
    else:
        fix = "if it may, start the server with its origin in cors_origins="
    return PermissionDenied(f"{page} may not send this request; {fix}", reason="ORIGIN_NOT_ALLOWED")
