"""API keys in a TOML file with a hash of each key.

::

    [[keys]]
    name = "team-a"                   # in the queue, and the owner of files, batches and stored responses
    hash = "sha256:<64 hex digits>"   # of the key; a list of hashes during a rotation
    scopes = ["inference"]            # the default; "admin": metrics and the replicas' state
    max_concurrent = 64               # this and the following are optional limits
    tokens_per_minute = 100000
    expires = 2027-01-31              # the first day, UTC, on which it is refused

Keys are random with 256 bits, so they cannot be guessed, and a plain SHA-256 is as safe as a slow hash.
"""

import hashlib
import hmac
import re
import secrets
import stat
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import structlog
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from services.common.errors import InvalidRequest
from services.common.host.file_watch import FileWatch

log = structlog.get_logger(__name__)

Scope = Literal["inference", "admin"]
INFERENCE: Final = "inference"
ADMIN: Final = "admin"
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "tk-"
_SECRET_BYTES = 32
NAME = r"[A-Za-z0-9._-]{1,64}"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Key:
    """An API key's name, permissions and limits."""

    name: str
    scopes: frozenset[str]
    max_concurrent: int | None = None  # concurrent requests
    tokens_per_minute: int | None = None
    expires_at: float | None = None  # Unix time
    digests: tuple[bytes, ...] = field(default=(), repr=False)  # SHA-256


class KeyRing:
    """Keys of one file. Belongs to one thread, or its owner locks it."""

    def __init__(self, keys: Sequence[Key], path: Path | None = None) -> None:
        self.keys = tuple(keys)
        self._path = path
        self._file_watch = FileWatch([] if path is None else [path])

    @classmethod
    def load(cls, path: str | Path) -> "KeyRing":
        """Load a file. Raises ``InvalidRequest`` if it cannot be read, is invalid, or every user can write to it."""
        path = Path(path).expanduser()
        ring = cls((), path)  # the file watch starts before the read
        ring.keys = _read(path)
        return ring

    def find(self, presented: str) -> Key | None:
        """Return the key whose value is ``presented``, or None if it is unknown or expired. Takes constant time."""
        digest = hashlib.sha256(presented.encode(errors="surrogateescape")).digest()
        found = None
        for key in self.keys:
            for known in key.digests:
                if hmac.compare_digest(digest, known):
                    found = key
        return None if found is None or _expired(found) else found

    def named(self, name: str) -> Key | None:
        """Return the key called ``name``, or None if it does not exist or has expired."""
        found = next((key for key in self.keys if key.name == name), None)
        return None if found is None or _expired(found) else found

    def refresh(self) -> bool:
        """Read the file again if it changed. Return whether the keys were replaced.

        The file is checked at most once a second. An invalid file is logged, and the previous keys stay in use.
        """
        if self._path is None or not self._file_watch.changed():
            return False
        try:
            self.keys = _read(self._path)
        except InvalidRequest as error:
            log.error("cannot reload the API keys: the previous ones stay in use", reason=error.message)
            return False
        log.info("API keys reloaded", keys=len(self.keys))
        return True


def new_key() -> str:
    """Return a new random key."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_of(key: str) -> str:
    """Return the hash of ``key`` as written in the file."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def salted(name: str, salt: str) -> str:
    """Return the ``cache_salt`` to use for ``salt`` if keys do not share the prefix cache.

    All salts must be converted by this function. Then no other key's caller can produce the same salt.
    """
    return hashlib.sha256(f"{len(name)}:{name}{salt}".encode(errors="surrogatepass")).hexdigest()


def _expired(key: Key) -> bool:
    return key.expires_at is not None and time.time() >= key.expires_at


def _hashes(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    hash: Annotated[tuple[str, ...], BeforeValidator(_hashes), Field(min_length=1)]
    scopes: Annotated[frozenset[Scope], Field(min_length=1)] = frozenset({INFERENCE})
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    expires: datetime | date | None = None

    @field_validator("hash")
    @classmethod
    def _are_hashes(cls, hashes: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(_HASH.fullmatch, hashes)):  # the value may be a key itself, so the message must not contain it
            raise ValueError("expected sha256: and 64 lower-case hexadecimal digits, as toka-key prints")
        return hashes

    def key(self) -> Key:
        expires = self.expires
        if expires is not None and not isinstance(expires, datetime):
            expires = datetime(expires.year, expires.month, expires.day)
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=UTC)
        return Key(
            self.name,
            self.scopes,
            self.max_concurrent,
            self.tokens_per_minute,
            None if expires is None else expires.timestamp(),
            tuple(bytes.fromhex(each.removeprefix("sha256:")) for each in self.hash),
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: Annotated[list[_Entry], Field(min_length=1)]


def _read(path: Path) -> tuple[Key, ...]:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(path.stat().st_mode) & stat.S_IWOTH:
                raise _wrong(path, "every user of this host can write to it and so create keys; run chmod o-w on it")
            document = tomllib.load(file)
    except OSError as error:
        raise _wrong(path, f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, f"is not TOML: {error}") from None
    try:
        keys = [entry.key() for entry in _File.model_validate(document).keys]
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise _wrong(path, f"{place}: {problem['msg'].removeprefix('Value error, ')}") from None
    _check_distinct(path, keys)
    return tuple(keys)


def _check_distinct(path: Path, keys: list[Key]) -> None:
    """Refuse repeated names and hashes. The message is logged, so it names keys and contains no hash."""
    for name, times in Counter(key.name for key in keys).items():
        if times > 1:
            raise _wrong(path, f"the name {name!r} is used {times} times; use it once")
    owners: dict[bytes, str] = {}
    for key in keys:
        for digest in key.digests:
            other = owners.setdefault(digest, key.name)
            if other != key.name:
                raise _wrong(path, f"the keys {other!r} and {key.name!r} have the same hash; give each key its own")
        if len(set(key.digests)) < len(key.digests):
            raise _wrong(path, f"the key {key.name!r} has the same hash twice; list it once")


def _wrong(path: Path, what: str) -> InvalidRequest:
    return InvalidRequest(f"flag api_keys_file={path}: {what}", field="api_keys_file")
