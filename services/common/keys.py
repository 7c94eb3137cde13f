"""API keys: a TOML file with a hash of each, and who a presented key belongs to.

::

    [[keys]]
    name = "team-a"                   # in the queue, and the owner of files, batches and stored responses
    hash = "sha256:<64 hex digits>"   # of the key; a list of them while one replaces another
    scopes = ["inference"]            # the default; "admin": metrics and the replicas' state
    max_concurrent = 64               # the rest may be left out: no limit, no end
    tokens_per_minute = 100000
    expires = 2027-01-31              # the first day, UTC, on which it is refused

Keys are random with 256 bits, so a plain SHA-256 is as good as a slow hash: there is nothing to guess.
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
    """Who may do what."""

    name: str
    scopes: frozenset[str]
    max_concurrent: int | None = None  # requests at once
    tokens_per_minute: int | None = None
    expires_at: float | None = None  # Unix time
    digests: tuple[bytes, ...] = field(default=(), repr=False)  # SHA-256


class KeyRing:
    """The keys of one file. Belongs to one thread, or is guarded by its owner."""

    def __init__(self, keys: Sequence[Key], path: Path | None = None) -> None:
        self.keys = tuple(keys)
        self._path = path
        self._file_watch = FileWatch([] if path is None else [path])

    @classmethod
    def load(cls, path: str | Path) -> "KeyRing":
        """Raises ``InvalidRequest`` for a file that cannot be read, is wrong, or may be written by anybody."""
        path = Path(path).expanduser()
        ring = cls((), path)  # watches from before it is read
        ring.keys = _read(path)
        return ring

    def find(self, presented: str) -> Key | None:
        """Whose key ``presented`` is; None: nobody's, or it has expired. Takes as long whichever it is."""
        digest = hashlib.sha256(presented.encode(errors="surrogateescape")).digest()
        found = None
        for key in self.keys:
            for known in key.digests:
                if hmac.compare_digest(digest, known):
                    found = key
        return None if found is None or _expired(found) else found

    def named(self, name: str) -> Key | None:
        """The key of that name; None: there is none, or it has expired."""
        found = next((key for key in self.keys if key.name == name), None)
        return None if found is None or _expired(found) else found

    def refresh(self) -> bool:
        """Read the file again if it changed, which is looked at once a second: whether there are new keys. A wrong one
        is logged, and the keys stay what they were."""
        if self._path is None or not self._file_watch.changed():
            return False
        try:
            self.keys = _read(self._path)
        except InvalidRequest as error:
            log.error("the API keys stay as they were", reason=error.message)
            return False
        log.info("API keys read again", keys=len(self.keys))
        return True


def new_key() -> str:
    """One that nobody has."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_of(key: str) -> str:
    """As the file has it."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def salted(name: str, salt: str) -> str:
    """The ``cache_salt`` that stands for the caller's own ``salt`` where keys share no cache: no other key's caller can
    name it, whatever salt it sends, as long as every salt goes through here."""
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
        if not all(map(_HASH.fullmatch, hashes)):  # what was given may be the key itself: it is not repeated
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
                raise _wrong(path, "anybody may write to it, and so make keys; chmod o-w it")
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
    _check_differ(path, keys)
    return tuple(keys)


def _check_differ(path: Path, keys: list[Key]) -> None:
    """What is wrong is logged, so it names keys and no hash."""
    for name, times in Counter(key.name for key in keys).items():
        if times > 1:
            raise _wrong(path, f"the name {name!r} is there {times} times; once is right")
    owners: dict[bytes, str] = {}
    for key in keys:
        for digest in key.digests:
            other = owners.setdefault(digest, key.name)
            if other != key.name:
                raise _wrong(path, f"the keys {other!r} and {key.name!r} have the same hash; give each one of its own")
        if len(set(key.digests)) < len(key.digests):
            raise _wrong(path, f"the key {key.name!r} has the same hash twice; once is right")


def _wrong(path: Path, what: str) -> InvalidRequest:
    return InvalidRequest(f"flag api_keys_file={path}: {what}", field="api_keys_file")
