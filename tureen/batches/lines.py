"""Reads the lines of a batch's input: one request each, as JSON."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from tureen.batches.records import MAX_LINES, InputFault
from tureen.errors import echo, excerpt

SLICE_BYTES, SLICE_LINES = 1 << 20, 256
"""How much of an input is read at a time: what comes in the meantime waits no longer."""

MAX_IGNORED = 64
MAX_FAULTS = 100
"""Most faults of an input that are told."""
MAX_ID_CHARS = 512
METHOD = "POST"
FIELDS = ("custom_id", "method", "url", "body")


class InputLine(NamedTuple):
    """A request of a batch."""

    number: int  # of its line in the file, from 1 on
    custom_id: str
    body: bytes  # a JSON object


class WrittenLine(msgspec.Struct):
    """A line as it is written."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BadLine(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class LineReader:
    """Reads the numbered lines of a file that are not blank, some at a time. Of a line of more than `max_bytes` one
    byte more is read, and then nothing. The file is open only during a call."""

    def __init__(self, open_file: Callable[[], io.BufferedReader], max_bytes: int) -> None:
        self._open_file = open_file
        self._max_bytes = max_bytes
        self._offset = 0
        self._number = 0
        self._begun = b""  # the beginning of a line that is longer than SLICE_BYTES
        self._is_over = False

    @property
    def is_at_end(self) -> bool:
        """Says whether nothing is left to read."""
        return self._is_over and not self._begun

    @property
    def is_in_long_line(self) -> bool:
        """Says whether the next line is so long that `long_line` must read it."""
        return bool(self._begun)

    def piece(self) -> list[tuple[int, bytes]]:
        """Returns the next lines, which all together have not much more than SLICE_BYTES; perhaps none. It stops
        before a long line. Raises OSError."""
        piece, num_bytes = list[tuple[int, bytes]](), 0
        most = min(SLICE_BYTES, self._max_bytes) + 1
        with self._open_file() as file:
            file.seek(self._offset)
            while num_bytes < SLICE_BYTES and len(piece) < SLICE_LINES and not (self._is_over or self._begun):
                raw = file.readline(most)
                self._offset += len(raw)
                self._number += 1
                if len(raw) == most and not raw.endswith(b"\n") and most <= self._max_bytes:
                    self._begun = raw
                    break
                self._is_over = not raw or len(raw) > self._max_bytes
                num_bytes += len(raw)
                if raw.strip():
                    piece.append((self._number, raw))
        return piece

    def long_line(self) -> tuple[int, bytes]:
        """Returns the line that has begun. Raises OSError."""
        with self._open_file() as file:
            file.seek(self._offset)
            rest = file.readline(self._max_bytes + 1 - len(self._begun))
        self._offset += len(rest)
        raw = self._begun + rest
        self._begun, self._is_over = b"", len(raw) > self._max_bytes
        return self._number, raw


def parse(number: int, raw: bytes) -> InputLine:
    """Parses a line that was checked before."""
    written = msgspec.json.decode(raw, type=WrittenLine)
    return InputLine(number, written.custom_id, bytes(written.body))


class InputCheck:
    """Checks an input line by line: `add_all` takes them in their order; `faults` says what is wrong."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self.num_lines = 0
        self.faults: list[InputFault] = []
        self.ignored: set[str] = set()  # names of fields that have no effect
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._seen: set[bytes] = set()  # digests of custom_ids

    @property
    def is_over(self) -> bool:
        """Says whether more lines would change nothing: the faults are too many, or the lines."""
        return len(self.faults) >= MAX_FAULTS or self.num_lines > MAX_LINES

    def add_all(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Checks numbered lines, until more would change nothing."""
        for number, raw in lines:
            if self.is_over:
                return
            self._add(number, raw)

    def _add(self, number: int, raw: bytes) -> None:
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            self.faults = [InputFault("too_many_requests", f"the file has more than {MAX_LINES} requests; split it")]
            return
        try:
            self._check(raw)
        except BadLine as fault:
            self.faults.append(InputFault(fault.code, fault.message, fault.param, number))

    def end(self) -> None:
        """Hears that there are no more lines."""
        if not self.num_lines:
            self.faults.append(InputFault("empty_file", "the file has no requests; it must have one a line"))

    def _check(self, raw: bytes) -> None:
        if len(raw) > self._max_bytes:
            raise BadLine("line_too_long", f"the line has more than {self._max_bytes} bytes; send less in it")
        written = self._written(raw)
        if not 1 <= len(written.custom_id) <= MAX_ID_CHARS:
            told = f"custom_id must have 1 to {MAX_ID_CHARS} characters, got {len(written.custom_id)}"
            raise BadLine("invalid_custom_id", told, "custom_id")
        if written.method != METHOD:
            raise BadLine("invalid_method", f"method must be {METHOD}, got {echo(written.method)}", "method")
        if written.url != self._endpoint:
            told = f"url must be the batch's endpoint {self._endpoint}, got {echo(written.url)}"
            raise BadLine("invalid_url", told, "url")
        if not bytes(written.body).lstrip().startswith(b"{"):
            raise BadLine("invalid_body", "body must be an object", "body")
        digest = blake2b(written.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            told = f"custom_id {echo(written.custom_id)} is used by an earlier line; each line needs its own"
            raise BadLine("duplicate_custom_id", told, "custom_id")
        self._seen.add(digest)

    def _written(self, raw: bytes) -> WrittenLine:
        """Raises BadLine."""
        try:
            raw.decode()
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            if len(self.ignored) < MAX_IGNORED:
                self.ignored.update(excerpt(name) for name in fields.keys() - set(FIELDS))
            missing = [name for name in FIELDS if name not in fields]
            if missing:
                raise BadLine("missing_required_parameter", f"{missing[0]} is missing", missing[0])
            return msgspec.json.decode(raw, type=WrittenLine)
        except UnicodeDecodeError:
            raise BadLine("invalid_json_line", "the line is not UTF-8") from None
        except msgspec.ValidationError as error:
            raise BadLine("invalid_json_line", f"the line must be an object of a request: {error}"[:200]) from None
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadLine("invalid_json_line", f"the line is not valid JSON: {error}"[:200]) from None
