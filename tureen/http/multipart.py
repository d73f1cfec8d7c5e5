"""Reads a form with one file (multipart/form-data, RFC 7578) in pieces, so the whole file is never in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tureen.errors import InvalidRequest, UnsupportedMediaType, echo, excerpt

FORM = "multipart/form-data"
MAX_FIELDS = 32
MAX_FIELD_BYTES = 4096

Sink = Callable[[bytes], Awaitable[None]]


class UploadedForm(NamedTuple):
    """A form that was read."""

    fields: dict[str, str]
    filename: str  # the last part of the file's name, as its sender called it


class FormReader:
    """Parses a form. `piece` has the bytes of the file that were read since the caller last took them."""

    def __init__(self, boundary: bytes, file_field: str) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.piece = bytearray()
        self._file_field = file_field
        self._headers: dict[bytes, bytes] = {}
        self._header = [bytearray(), bytearray()]  # name and value of the header that is being read
        self._field = ""
        self._value: bytearray | None = None  # of the field that is being read; None: the file is being read
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._add,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parses a piece of the form. Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the form is not valid {FORM}: {error}"[:200], code="invalid_form") from None

    def finish(self) -> UploadedForm:
        """Returns the form after its end was read. Raises InvalidRequest."""
        if not self._is_complete:
            raise InvalidRequest("the form ends before its last boundary", code="invalid_form")
        if self.filename is None:
            raise InvalidRequest(f"{self._file_field} is missing", field=self._file_field)
        return UploadedForm(self.fields, self.filename)

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._value = None if self._field == self._file_field else bytearray()
        if self._field in self.fields or (self._value is None and self.filename is not None):
            raise InvalidRequest(f"{excerpt(self._field)} occurs twice in the form", field=excerpt(self._field))
        if self._value is None:
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = name.replace("\\", "/").rpartition("/")[2]
        elif len(self.fields) >= MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields", code="invalid_form")

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self.piece += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            name = excerpt(self._field)
            raise InvalidRequest(f"{name} has more than {MAX_FIELD_BYTES} bytes", field=name)

    def _end_part(self) -> None:
        if self._value is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


async def read_form(request: Request, file_field: str, sink: Sink) -> UploadedForm:
    """Reads a form whose one file is in `file_field`. Passes the file's bytes to `sink` as they arrive.

    Raises UnsupportedMediaType, InvalidRequest, and what `sink` raises.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind.decode("latin-1").lower() != FORM or b"boundary" not in options:
        raise UnsupportedMediaType(
            f"the body must be a form, {FORM} with a boundary, got content type "
            f"{echo(request.headers.get('content-type', ''))}"
        )
    try:
        reader = FormReader(options[b"boundary"], file_field)
    except FormParserError as error:
        raise InvalidRequest(f"the form's boundary: {error}"[:200], code="invalid_form") from None
    async for data in request.stream():
        reader.feed(data)
        if reader.piece:
            piece, reader.piece = bytes(reader.piece), bytearray()
            await sink(piece)
    return reader.finish()
