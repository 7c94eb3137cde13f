"""The header ``Idempotency-Key``, with which clients repeat a request safely."""

import hashlib
import re

from starlette.datastructures import Headers

from services.common.errors import InvalidValue
from services.common.json_scan import Raw

_HEADER = "Idempotency-Key"
_VISIBLE = re.compile(r"[\x21-\x7e]{1,255}")


def read_idempotency_key(headers: Headers) -> str:
    """Return the idempotency key, or an empty string if the header is missing. Raises InvalidRequest if malformed."""
    given = headers.get(_HEADER, "")
    if given and not _VISIBLE.fullmatch(given):
        raise InvalidValue(
            f"the header {_HEADER} must have 1 to 255 visible ASCII characters, for example a UUID", field=_HEADER
        )
    return given


def fingerprint(*parts: str | Raw) -> str:
    """Return a hash of the request's parts.

    Each part is length-prefixed, so moving a byte between parts changes the hash.
    """
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def seed_of_retries(owner: str, key: str, path: str, body: Raw) -> int:
    """Return a seed that is the same for each retry of a request, so that its answers are the same."""
    return int(fingerprint(owner, key, path, body)[:16], 16)
