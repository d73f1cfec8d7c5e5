"""Appends the answers of a batch's lines to its two files, and knows after a crash which lines have one.

A file is its own journal. Whole lines are appended and synchronised with the disk before they count; a line that was
cut short by a crash is taken away when the files are opened again, and its request runs again. Each result's id ends
with the number of its line in the input, which is how a line that is answered is known.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tureen.batches.contents import Contents
from tureen.batches.records import BatchRecord, Counts
from tureen.batches.usage import NOTHING, usage_of


class LineResult(NamedTuple):
    """The answer to a line, as a line of JSON."""

    number: int  # of the line in the input
    text: bytes
    is_error: bool


class LineFailure(msgspec.Struct):
    """The reason why a line has no answer."""

    code: str
    message: str


class Response(msgspec.Struct):
    """The answer to a line, as HTTP would have had it."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class WrittenResult(msgspec.Struct):
    """A line of the files."""

    id: str
    custom_id: str
    response: Response | None
    error: LineFailure | None


class ResultId(msgspec.Struct):
    """The part of a written line that says which line of the input it answers."""

    id: str


def answered(batch: BatchRecord, number: int, custom_id: str, response: Response) -> LineResult:
    """Makes the result of a line that was run."""
    text = _text(WrittenResult(_id(batch, number), custom_id, response, None))
    return LineResult(number, text, response.status_code >= 400)


def failed(batch: BatchRecord, number: int, custom_id: str, failure: LineFailure) -> LineResult:
    """Makes the result of a line that was not run."""
    return LineResult(number, _text(WrittenResult(_id(batch, number), custom_id, None, failure)), True)


def _text(result: WrittenResult) -> bytes:
    text = msgspec.json.encode(result)
    return (msgspec.json.encode(msgspec.json.decode(text)) if b"\n" in text else text) + b"\n"


def _id(batch: BatchRecord, number: int) -> str:
    return f"batch_req_{batch.digits}_{number}"


class ResultLog:
    """The two files of a batch. A file is open only during a call. One thread at a time."""

    def __init__(self, contents: Contents, batch: BatchRecord) -> None:
        """Make the files, if absent, and read which lines are answered. Raises OSError."""
        self.done: set[int] = set()  # numbers of lines
        self._total = batch.counts.total
        self.usage = NOTHING
        self._num_failed = 0
        self._contents = contents
        self._output, self._errors = batch.output_id, batch.error_id
        self._sizes = {file_id: self._recover(file_id) for file_id in (self._output, self._errors)}
        contents.sync()

    @property
    def counts(self) -> Counts:
        """The lines that are answered."""
        return Counts(self._total, len(self.done) - self._num_failed, self._num_failed)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the answers, and of the errors."""
        return self._sizes[self._output], self._sizes[self._errors]

    def append(self, results: Sequence[LineResult]) -> int:
        """Adds results of lines that have none yet; when it returns, they are on the disk. Returns the bytes that were
        added.

        Raises OSError; then nothing was added.
        """
        fresh = [result for result in results if result.number not in self.done]
        before = dict(self._sizes)
        with contextlib.ExitStack() as stack:
            opened: dict[str, io.FileIO] = {}
            try:
                for file_id, is_error in ((self._output, False), (self._errors, True)):
                    text = b"".join(result.text for result in fresh if result.is_error is is_error)
                    if text:
                        opened[file_id] = stack.enter_context(self._unchanged(file_id))
                        self._sizes[file_id] += _write(opened[file_id], text)
            except OSError:
                for file_id, file in opened.items():
                    os.ftruncate(file.fileno(), before[file_id])
                self._sizes = before
                raise
        self.done.update(result.number for result in fresh)
        self._num_failed += sum(result.is_error for result in fresh)
        for result in fresh:
            self.usage = self.usage.plus(usage_of(result.text))
        return sum(self._sizes.values()) - sum(before.values())

    def _unchanged(self, file_id: str) -> io.FileIO:
        """Open a file that is as this log left it. Raises OSError if another program changed or removed it."""
        file = self._contents.extend(file_id)
        if os.fstat(file.fileno()).st_size != self._sizes[file_id]:
            file.close()
            raise OSError(errno.ESTALE, "another program changed this file", file_id)
        return file

    def _recover(self, file_id: str) -> int:
        """Read the whole lines of a file and cut off what follows them. Returns the bytes that stay."""
        end = 0
        with self._contents.extend(file_id) as file:
            with io.BufferedReader(io.FileIO(os.dup(file.fileno()), "r")) as reader:
                reader.seek(0)
                for raw in reader:
                    number = _number(raw)
                    if number is None:
                        break
                    self.done.add(number)
                    self._num_failed += file_id == self._errors
                    self.usage = self.usage.plus(usage_of(raw))
                    end += len(raw)
            if os.fstat(file.fileno()).st_size > end:
                os.ftruncate(file.fileno(), end)
                os.fsync(file.fileno())
        return end


def _write(file: io.FileIO, text: bytes) -> int:
    """Raises OSError; then some of it may be written."""
    rest = memoryview(text)
    while rest:
        rest = rest[file.write(rest) or 0 :]
    os.fsync(file.fileno())
    return len(text)


def _number(raw: bytes) -> int | None:
    """Returns the number of the input's line that a line answers; None for one that was cut short."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return int(msgspec.json.decode(raw, type=ResultId).id.rpartition("_")[2])
    except (msgspec.DecodeError, ValueError):
        return None
