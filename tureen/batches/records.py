"""Values about stored files and batches, with OpenAI's names: https://platform.openai.com/docs/api-reference/batch"""

from __future__ import annotations

import uuid
from typing import Literal, NamedTuple

import msgspec

from tureen.batches.usage import NOTHING, TokensUsed

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")

Purpose = Literal["batch", "batch_output"]

MAX_FILE_BYTES = 200 << 20
MAX_LINES = 50_000
"""Most requests of a batch; this and the size of a file are OpenAI's."""

MAX_FILES = 10_000
"""Most files that one client may keep."""
MAX_UNENDED = 100
"""Most batches of one client that have not ended."""
MAX_BATCHES = 10_000
"""Most batches of one client that are remembered; of more, those that ended first are forgotten."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a client: what is known of it besides its bytes."""

    id: str
    client: str  # "" = anonymous
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: int  # Unix time in seconds, as all times here
    expires_at: int | None = None


class InputFault(msgspec.Struct, frozen=True):
    """A reason why a batch cannot begin."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # of the input file, from 1 on


class Counts(msgspec.Struct, frozen=True):
    """The lines of a batch: how many there are, how many are answered, how many failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of requests. A new record replaces it when it changes."""

    id: str
    client: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    times: dict[str, int] = {}  # status -> when the batch came to it
    counts: Counts = Counts()
    faults: tuple[InputFault, ...] = ()
    ignored: tuple[str, ...] = ()  # fields of lines that have no effect
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None  # so long after their making the files of answers are kept
    output_file_id: str | None = None
    error_file_id: str | None = None
    is_late: bool = False  # its time was over before every line had an answer
    usage: TokensUsed = NOTHING

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def output_id(self) -> str:
        """The id that the file of answers gets, if there are any."""
        return f"file-{self.digits}-output"

    @property
    def error_id(self) -> str:
        """The id that the file of errors gets, if there are any."""
        return f"file-{self.digits}-errors"

    @property
    def digits(self) -> str:
        return self.id.removeprefix("batch_")

    def now(self, status: Status, time_s: int, **changes: object) -> BatchRecord:
        """Returns the record of the batch in another status since `time_s`."""
        return msgspec.structs.replace(self, status=status, times={**self.times, status: time_s}, **changes)


class Page(NamedTuple):
    """A part of a list: which entries a client asked for."""

    limit: int
    after: str | None = None  # id of the entry before the first
    is_ascending: bool = False  # the oldest first
    purpose: str | None = None


def new_id(prefix: str) -> str:
    """Returns a new id of a file ("file-") or a batch ("batch_")."""
    return prefix + uuid.uuid4().hex
