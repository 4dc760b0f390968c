"""Reads an upload form as it arrives, so that the whole file is never held in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from midstream.errors import InvalidArgumentError

_MAX_FIELDS, _MAX_FIELD_BYTES = 16, 1024
_TOO_MUCH = f"the form has more than {_MAX_FIELDS} fields, or one of more than {_MAX_FIELD_BYTES} bytes"
_FILE = b"file"


class Form:
    """A form with one file, parsed as it arrives."""

    def __init__(self, content_type: str) -> None:
        """Prepare to parse a body. Raises InvalidArgumentError if its content type is not that of a form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidArgumentError("the body must be multipart/form-data")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.has_file = False
        self._name = b""
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = b"", b""
        self._field = bytearray()
        self._new = bytearray()
        self._num_parts = 0
        self._is_over = False
        self._parser = MultipartParser(boundary, self._callbacks())

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        def header_field(data: bytes, start: int, end: int) -> None:
            self._header += data[start:end]

        def header_value(data: bytes, start: int, end: int) -> None:
            self._value += data[start:end]

        def header_end() -> None:
            self._headers[self._header.lower()] = self._value
            self._header, self._value = b"", b""

        def over() -> None:
            self._is_over = True

        return {
            "on_part_begin": self._headers.clear,
            "on_header_field": header_field,
            "on_header_value": header_value,
            "on_header_end": header_end,
            "on_headers_finished": self._begin_part,
            "on_part_data": self._take,
            "on_part_end": self._end_part,
            "on_end": over,
        }

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"")
        self._field.clear()
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise InvalidArgumentError(_TOO_MUCH)
        if self._name == _FILE:
            if self.has_file:
                raise InvalidArgumentError("must be one file", field="file")
            self.has_file = True
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255]

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._new += data[start:end]
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            raise InvalidArgumentError(_TOO_MUCH)

    def _end_part(self) -> None:
        if self._name != _FILE:
            self.fields[self._name.decode("utf-8", "replace")] = self._field.decode("utf-8", "replace")

    async def file(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the file's contents as they arrive; all other attributes are complete once the iteration has ended.
        Raises InvalidArgumentError if the body is not a form with one file.
        """
        write: Any = self._parser.write
        async for data in stream:
            try:
                write(data)
            except FormParserError as error:
                raise InvalidArgumentError(f"the body is not a valid form: {error}") from None
            if self._new:
                found, self._new = bytes(self._new), bytearray()
                yield found
        if not self._is_over:
            raise InvalidArgumentError("the form is not complete")
        if not self.has_file:
            raise InvalidArgumentError("must be set", field="file")
