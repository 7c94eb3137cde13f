"""The console's static files, served as they are in the package."""

import hashlib
from pathlib import Path

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


class Assets:
    """The files, read into memory once. A path in a request is never used as a path of the file system."""

    def __init__(self) -> None:
        files = {path.name: path for path in sorted(_DIRECTORY.iterdir()) if path.suffix in _TYPES}
        self._contents = {name: (path.read_bytes(), _TYPES[path.suffix]) for name, path in files.items()}
        self._tags = {
            name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, (content, _) in self._contents.items()
        }

    def page(self, request: Request) -> Response:
        """Return the console's page."""
        return self._respond(request, "index.html")

    def file(self, request: Request, name: str) -> Response:
        """Return a static file. Raises ``NotFound``."""
        if name not in self._contents:
            raise NotFound(f"the console has no file {name[:100]!r}", reason="UNKNOWN_URL")
        return self._respond(request, name)

    def _respond(self, request: Request, name: str) -> Response:
        content, media_type = self._contents[name]
        headers = _HEADERS | {"etag": self._tags[name]}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers | {"content-type": media_type})
