"""``Idempotency-Key``: the same request, sent again by a client that does not know what became of it."""

import hashlib
import re

from starlette.datastructures import Headers

from services.common.errors import InvalidRequest
from services.common.json_scan import Raw

_HEADER = "Idempotency-Key"
_VISIBLE = re.compile(r"[\x21-\x7e]{1,255}")


def read_idempotency_key(headers: Headers) -> str:
    """Empty without one. Raises ``InvalidRequest``."""
    given = headers.get(_HEADER, "")
    if given and not _VISIBLE.fullmatch(given):
        raise InvalidRequest(
            f"the header {_HEADER} has 1 to 255 visible ASCII characters; a UUID is right",
            field=_HEADER,
            reason="INVALID_VALUE",
        )
    return given


def fingerprint(*parts: str | Raw) -> str:
    """Of a request: another for any other. Parts are told apart."""
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def seed_of_retries(owner: str, key: str, path: str, body: Raw) -> int:
    """The seed of answers to this very request, so that a retry draws what its first try drew."""
    return int(fingerprint(owner, key, path, body)[:16], 16)
