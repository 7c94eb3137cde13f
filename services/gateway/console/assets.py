"""The console's static files, served as they are in the package."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import Request, Response

from services.common.errors import NotFound

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No inline scripts, no other origins, and no strings parsed as HTML, so that the output of a model stays text.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers revalidate the file by its etag each time
}


class _Asset(NamedTuple):
    content: bytes
    media_type: str
    tag: str


@cache
def _assets() -> dict[str, _Asset]:
    """Return the files by name, read once. A path in a request is never used as a path of the file system."""
    found = {}
    for path in _DIRECTORY.iterdir():
        if path.suffix in _TYPES:
            content = path.read_bytes()
            found[path.name] = _Asset(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def respond(request: Request, name: str) -> Response:
    """Return a static file. Raises ``NotFound``."""
    if (asset := _assets().get(name)) is None:
        raise NotFound(f"the console has no file {name[:100]!r}", reason="UNKNOWN_URL")
    headers = _HEADERS | {"etag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers | {"content-type": asset.media_type})
