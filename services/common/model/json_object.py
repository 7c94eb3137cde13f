"""Reads JSON files of a model as untrusted data.

A file that cannot be read, and a value of a wrong type or size, raise ``InvalidRequest`` that names the file and the
field.
"""

import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from services.common.errors import InvalidRequest

LARGEST_JSON = 32 * 1024**2  # bytes; the largest index of a published model has 9 MB
LARGEST_TOKENIZER = 256 * 1024**2  # bytes; published files have up to 34 MB
MOST_VOCABULARY = 1 << 22  # token ids; published models have up to 262,208
_DEEPEST = 64  # nesting of objects and lists
V = TypeVar("V")
_FETCH = "fetch the file again, or choose another model"


def read_bytes(path: Path, *, most: int = LARGEST_JSON, field: str = "model") -> bytes | None:
    """Return the content of a file, or None if it does not exist.

    Raises ``InvalidRequest`` for a file that cannot be read, has more than ``most`` bytes, or is not a regular file: a
    read from a pipe or a device may not end.
    """
    try:
        described = path.stat()
        if not stat.S_ISREG(described.st_mode):
            raise InvalidRequest(f"{path} is not a regular file; {_FETCH}", field=field)
        if described.st_size > most:
            raise InvalidRequest(
                f"{path} has {described.st_size:,} bytes; at most {most:,} are read: choose another model", field=field
            )
        with path.open("rb") as file:
            return file.read(most)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); {_FETCH}", field=field) from error


def read_text(path: Path, *, most: int = LARGEST_JSON, field: str = "model") -> str | None:
    """Return the content of a UTF-8 file, or None if it does not exist. Raises ``InvalidRequest`` as ``read_bytes``."""
    content = read_bytes(path, most=most, field=field)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 (byte {error.start:,}); {_FETCH}", field=field) from error


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the JSON object in ``path``, or an empty object if the file does not exist and is not ``required``.

    Raises ``InvalidRequest`` for a file that is not a JSON object, is nested too deeply, or contains text that is not
    Unicode.
    """
    text = read_text(path)
    if text is None:
        if required:
            raise InvalidRequest(f"{path} does not exist: model= must be a Hugging Face model directory", field="model")
        return {}
    content = parse_json(text, str(path))
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} is {kind_of(content)}; expected a JSON object; {_FETCH}", field="model")
    return content


def parse_json(text: str | bytes, file: str) -> Any:
    """Return the JSON value ``text``, the content of ``file``. Raises ``InvalidRequest``."""
    try:
        content = json.loads(text)
        _check(content)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            reason = f"objects and lists are more than {_DEEPEST} deep"
        elif isinstance(error, UnicodeError):
            reason = "a text is not Unicode"
        else:
            reason = str(error) if isinstance(error, json.JSONDecodeError) else "a number has too many digits"
        raise InvalidRequest(f"{file} is not valid JSON: {reason}; {_FETCH}", field="model") from error
    return content


def check_name(file: str, name: Any) -> str:
    """Return ``name``, a file name that ``file`` contains, if it names a file in or below the same directory.

    Symbolic links are allowed, because the hub's cache consists of them. Raises ``InvalidRequest``.
    """
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or os.path.isabs(name)
        or not {"", ".", ".."}.isdisjoint(name.split("/"))
    ):
        raise InvalidRequest(
            f"{file}: {reprlib.repr(name)} is not the name of a file in the model's directory; {_FETCH}", field="model"
        )
    return name


def kind_of(value: Any) -> str:
    """Return the JSON type of ``value`` with its article."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


class JsonObject:
    """Checked access to the fields of a JSON object. As in transformers, null means absent."""

    def __init__(self, file: str, values: Mapping[str, Any], path: str = "", *, flag: str = "model") -> None:
        """``file`` and ``path`` (such as ``rope_scaling.``) name the object in errors, whose field is ``flag``."""
        self.values = values
        self._file, self._path, self._flag = file, path, flag

    def wrong(self, name: str, expected: str) -> InvalidRequest:
        """Return the error for the value of a field."""
        return InvalidRequest(
            f"{self._file}: {self._path}{name}={reprlib.repr(self.values.get(name))} is not supported; expected"
            f" {expected}",
            field=self._flag,
        )

    def integer_or_none(self, name: str, *, least: int = 1, most: int) -> int | None:
        """Return an integer, or None if it is absent. A number without a fraction counts as an integer."""
        value = self.values.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self.wrong(name, f"an integer from {least:,} to {most:,}")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        """Return an integer. Without ``default``, an absent value raises ``InvalidRequest``."""
        value = self.integer_or_none(name, least=least, most=most)
        return self._given(name, default if value is None else value)

    def number_or_none(self, name: str, *, least: float = 0.0, most: float) -> float | None:
        """Return a finite number, or None if it is absent."""
        value = self.values.get(name)
        if value is not None and (type(value) not in (int, float) or not least <= value <= most):
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0, most: float) -> float:
        """Return a finite number. Without ``default``, an absent value raises ``InvalidRequest``."""
        value = self.number_or_none(name, least=least, most=most)
        return self._given(name, default if value is None else value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.values.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        value = self.values.get(name)
        if value is not None and type(value) is not str:
            raise self.wrong(name, "a string")
        return default if value is None else value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of strings, or None if it is absent."""
        value = self.values.get(name)
        if value is not None and (type(value) is not list or any(type(each) is not str for each in value)):
            raise self.wrong(name, "a list of strings")
        return value

    def integers(self, name: str) -> list[int] | None:
        """Return a list of integers, or None if it is absent."""
        value = self.values.get(name)
        if value is not None and (type(value) is not list or any(type(each) is not int for each in value)):
            raise self.wrong(name, "a list of integers")
        return value

    def numbers(self, name: str, count: int, *, least: float, most: float) -> tuple[float, ...] | None:
        """Return a list of ``count`` finite numbers, or None if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not list or any(type(each) not in (int, float) for each in value):
            raise self.wrong(name, "a list of numbers")
        if len(value) != count or not all(least <= each <= most for each in value):
            raise self.wrong(name, f"{count} numbers from {least:g} to {most:g}")
        return tuple(value)

    def object(self, name: str) -> "JsonObject":
        """Return an object. It is empty if the field is absent."""
        value = self.values.get(name)
        if value is not None and type(value) is not dict:
            raise self.wrong(name, "an object")
        return JsonObject(self._file, value or {}, f"{self._path}{name}.", flag=self._flag)

    def _given(self, name: str, value: V | None) -> V:
        if value is None:
            raise InvalidRequest(f"{self._file}: {self._path}{name} is missing", field=self._flag)
        return value


def _check(content: Any) -> None:
    """Raise ``ValueError`` for half of a surrogate pair, and ``RecursionError`` for nesting deeper than ``_DEEPEST``.

    Encoders fail for such text, and recursive functions for such nesting.
    """
    level = [content]
    for _ in range(_DEEPEST):
        texts = [each for each in _parts(level) if isinstance(each, str)]
        for text in texts:
            if not text.isascii():
                text.encode()
        level = [each for each in _parts(level) if isinstance(each, dict | list)]
        if not level:
            return
    raise RecursionError


def _parts(values: list[Any]) -> Iterator[Any]:
    """Yield the items, keys and values of containers, and other values themselves."""
    for value in values:
        if isinstance(value, dict):
            yield from value
            yield from value.values()
        elif isinstance(value, list):
            yield from value
        else:
            yield value
