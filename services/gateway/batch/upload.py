"""Reads ``multipart/form-data`` with one file, which is written to a blob while it arrives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.common.errors import InvalidRequest, InvalidValue, PayloadTooLarge
from services.gateway.store.blobs import BlobWriter

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FILE_BYTES = 512 * 1024 * 1024
_MAX_REST_BYTES = 1024 * 1024  # of a form, beside the file's content
_MAX_FIELD_BYTES = 64 * 1024
_MAX_FIELDS = 100
_MAX_HEADER_BYTES = 16 * 1024


@dataclass
class Form:
    """The fields of a form, without the content of its file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None if the form has no file


async def receive_form(request: Request, writer: BlobWriter, digest: Callable[[bytes], None] | None = None) -> Form:
    """Read a form to its last boundary. Write the content of ``file`` to ``writer``, and pass it to ``digest``.

    Raises ``InvalidRequest``, ``PayloadTooLarge``, or ``ClientDisconnect``. The caller closes the writer.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequest("expected multipart/form-data with a file and a purpose", reason="INVALID_FORM")
    if int(request.headers.get("content-length", 0)) > MAX_FILE_BYTES + _MAX_REST_BYTES:
        raise _too_large()
    reader, received = _Reader(), 0
    try:
        parser = MultipartParser(options[b"boundary"], reader.callbacks)
        async for data in request.stream():
            if data:
                received += len(data)
                parser.write(data)
                for part in reader.take():
                    await writer.write(part)
                    if digest is not None:
                        digest(part)
                if writer.bytes > MAX_FILE_BYTES:
                    raise _too_large()
                if reader.ended:
                    break
                if received - writer.bytes > _MAX_REST_BYTES:
                    raise InvalidRequest(
                        f"the form has more than {_MAX_REST_BYTES} bytes beside the file; leave them out",
                        reason="INVALID_FORM",
                    )
    except MultipartParseError as error:
        raise InvalidRequest(f"the form cannot be read: {error}", reason="INVALID_FORM") from None
    if not reader.ended:
        raise InvalidRequest("the form ends before its last boundary; send all of it", reason="INVALID_FORM")
    return reader.form


class _Reader:
    """The callbacks of the parser, which collect the parts of a form."""

    def __init__(self) -> None:
        self.form = Form()
        self.ended = False
        self._content: list[bytes] = []  # of the file, since the last call of ``take``
        self._headers: dict[bytes, bytes] = {}
        self._header = (bytearray(), bytearray())
        self._name: str | None = None  # of the field that is being read, or None for the file
        self._value = bytearray()
        self.callbacks: MultipartCallbacks = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._on_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._on_header(1, data[start:end]),
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": lambda data, start, end: self._on_data(data[start:end]),
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def take(self) -> list[bytes]:
        """Return the content of the file since the last call."""
        content, self._content = self._content, []
        return content

    def _on_part_begin(self) -> None:
        self._headers.clear()

    def _on_header(self, part: int, data: bytes) -> None:
        self._header[part].extend(data)
        if len(self._header[part]) > _MAX_HEADER_BYTES:
            raise InvalidRequest("a part of the form has too long a header", reason="INVALID_FORM")

    def _on_header_end(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())
        if len(self._headers) > _MAX_FIELDS:
            raise InvalidRequest("a part of the form has too many headers", reason="INVALID_FORM")

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        self._value.clear()
        if name != "file":
            self._name = name
            return
        if self.form.filename is not None:
            raise InvalidRequest("the form has two files; send one at a time", field="file", reason="INVALID_FORM")
        self._name = None
        filename = options.get(b"filename", b"").decode(errors="replace").replace("%22", '"')  # as HTML 5 quotes
        if "\0" in filename:  # PostgreSQL rejects NUL characters
            raise InvalidValue(
                "invalid value for 'file': its filename has a NUL character; leave that out", field="file"
            )
        self.form.filename = filename[:1024] or "upload"

    def _on_data(self, data: bytes) -> None:
        if self._name is None:
            self._content.append(data)
            return
        self._value += data
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"the field {self._name[:100]!r} is too long", field=self._name[:100])

    def _on_part_end(self) -> None:
        if self._name is not None:
            self.form.fields[self._name] = self._value.decode(errors="replace")
            if len(self.form.fields) > _MAX_FIELDS:
                raise InvalidRequest("the form has too many fields", reason="INVALID_FORM")

    def _on_end(self) -> None:
        self.ended = True


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"the file is larger than {MAX_FILE_BYTES} bytes; split it", field="file")
