"""Opens the folder of files and batches, and answers the lines of batches as their routes do over HTTP."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from tureen.batches.records import BatchRecord, Purpose, StoredFile
from tureen.batches.results import Response
from tureen.batches.runner import BatchRunner
from tureen.batches.store import Store
from tureen.batches.upload import uploading
from tureen.clients.keys import NO_LIMITS, Limits
from tureen.clients.quotas import Account, ClientWork
from tureen.dialects.openai.batch_body import TABLE, ExpiresAfter
from tureen.errors import InvalidRequest, Unavailable, echo
from tureen.fields import ignored, unknown
from tureen.fields.body import convert
from tureen.fields.ignored import Telling
from tureen.http.call import ClientCall, call_of
from tureen.http.dialect import Entry, client_name
from tureen.http.errors import error_object
from tureen.http.inner_call import InnerAnswer, call_route
from tureen.http.middleware import is_strict
from tureen.http.multipart import UploadedForm, read_form
from tureen.log import get_logger
from tureen.requests.state import ServerState

MAX_ATTEMPTS = 3
"""How often a line is run whose output was aborted, as by an operator's command."""

OUR_FAULT = (429, 503)
"""Statuses that speak of the server as it is now, not of the line: it is run again."""
OWN_FAULT = ("deadline_unreachable",)
"""Codes of such answers that speak of the line after all."""

MAX_WAIT_S = 60

pause = asyncio.sleep

log = get_logger("batches")

UPLOAD_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_NAME_CHARS = 255


class NotInBatches(msgspec.Struct):
    """The fields of bodies by which an answer would come otherwise than whole and when it is done."""

    stream: msgspec.Raw = msgspec.Raw(b"null")
    background: msgspec.Raw = msgspec.Raw(b"null")


class ErrorCode(msgspec.Struct):
    """The part of an error that says what it is about."""

    code: str | None = None


class ErrorBody(msgspec.Struct):
    """An error of these routes, as far as it matters here."""

    error: ErrorCode


class BatchService:
    """Files and batches of one server, from its start to its end."""

    def __init__(self, state: ServerState, endpoints: Sequence[Entry]) -> None:
        """`endpoints`: the routes that lines may ask. Raises StartupError."""
        config = state.context.config
        assert config.batch_path is not None
        self._state = state
        self.store = Store(config.batch_path, config.max_batch_bytes)
        self.runner = BatchRunner(
            self.store,
            LineCaller(state, {entry.path: entry for entry in endpoints}).answer,
            state.common.admitted.is_idle,
            max_lines=state.context.info.max_running_requests,
            max_line_bytes=config.max_body_bytes,
            note=partial(state.metrics.set, "num_batches"),
        )

    async def receive(self, request: Request) -> StoredFile:
        """Keeps the file of an upload. Raises InvalidRequest, UnsupportedMediaType, PayloadTooLarge, Unavailable."""
        self._state.check_open()
        told = call_of(request.scope).telling
        told.unknown_fields = self._state.context.config.unknown_fields
        told.is_strict = is_strict(request.scope)
        ignored.current.set(told)
        try:
            async with uploading(self.store, client_name(request)) as upload:
                fields = _fields(await read_form(request, "file", upload.write))
                return await upload.keep(fields.filename, fields.purpose, fields.lifetime_s)
        except OSError as error:
            log.error("an upload cannot be kept: %s", error.strerror)
            raise Unavailable(
                "the file cannot be kept: the disk of --batch-path is full, or cannot be written now",
                code="storage_failed",
                retry_after_s=MAX_WAIT_S,
            ) from None

    def start(self) -> None:
        """Goes on with the batches of before."""
        self.runner.start()

    def drain(self) -> None:
        """Gives up the lines that run; they run again after the next start."""
        self.runner.stop()

    async def close(self) -> None:
        """Ends all of it."""
        await self.runner.close()
        await asyncio.to_thread(self.store.close)


class UploadFields(NamedTuple):
    """The fields of an upload."""

    filename: str
    purpose: Purpose
    lifetime_s: int | None


def _fields(form: UploadedForm) -> UploadFields:
    """Raises InvalidRequest."""
    for name in form.fields:
        if name not in UPLOAD_FIELDS:
            unknown.settle_inner(name, UPLOAD_FIELDS, TABLE)
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        got = "none" if purpose is None else echo(purpose)
        raise InvalidRequest(f"purpose must be batch, the only use of files here; got {got}", field="purpose")
    if len(form.filename) > MAX_NAME_CHARS or not form.filename.isprintable():
        raise InvalidRequest(f"file: its name may have {MAX_NAME_CHARS} printable characters", field="file")
    anchor, seconds = (form.fields.get(name) for name in UPLOAD_FIELDS[1:])
    if anchor is None and seconds is None:
        return UploadFields(form.filename, "batch", None)
    number = int(seconds) if seconds is not None and re.fullmatch("[0-9]{1,9}", seconds) else seconds
    expiry = {"anchor": anchor or "created_at", "seconds": number}
    return UploadFields(form.filename, "batch", convert(expiry, ExpiresAfter, "expires_after[{}]".format).seconds)


class LineCaller(NamedTuple):
    """Runs lines of batches through the routes that they ask."""

    state: ServerState
    endpoints: Mapping[str, Entry]

    async def answer(self, batch: BatchRecord, body: bytes) -> Response:
        """Returns the answer to a line. A line runs when no other request does, and again if it was not answered."""
        request_id = uuid.uuid4().hex[:12]
        refusal = _refusal(body)
        if refusal is not None:
            return Response(refusal.status, request_id, msgspec.Raw(msgspec.json.encode(error_object(refusal))))
        num_attempts = 0
        while True:
            limits = Limits(weight=self._limits(batch.client).weight)
            told = Telling(unknown_fields=self.state.context.config.unknown_fields)
            call = ClientCall(request_id, batch.client, limits, telling=told)
            work = ClientWork(Account(limits), when_idle=True)
            answer = await call_route(self.endpoints[batch.endpoint], body, call, work)
            num_attempts += 1
            if _is_our_fault(answer):
                await pause(min(MAX_WAIT_S, int(answer.headers.get("retry-after", "1"))))
            elif not (work.has_failed and answer.status == 200) or num_attempts == MAX_ATTEMPTS:
                for label in told.labels:
                    self.state.metrics.count_ignored(label)
                self.state.metrics.add("num_batch_lines")
                self.state.metrics.add("num_batch_lines_failed", int(answer.status >= 400))
                return Response(answer.status, request_id, msgspec.Raw(answer.body))

    def _limits(self, client: str) -> Limits:
        """Returns the limits of a client's key, as they are now."""
        keys = self.state.common.keys.keys if client else ()
        return next((key.limits for key in keys if key.name == client), NO_LIMITS)


def _refusal(body: bytes) -> InvalidRequest | None:
    """Returns the error for a line whose answer would not come whole and when it is done."""
    try:
        sent = msgspec.json.decode(body, type=NotInBatches)
    except msgspec.DecodeError:
        return None  # the route says what is wrong
    for field in NotInBatches.__struct_fields__:
        if bytes(getattr(sent, field)).strip() == b"true":
            return InvalidRequest(f"{field}: answers of a batch are written to a file; leave it out", field=field)
    return None


def _is_our_fault(answer: InnerAnswer) -> bool:
    if answer.status not in OUR_FAULT:
        return False
    try:
        return msgspec.json.decode(answer.body, type=ErrorBody).error.code not in OWN_FAULT
    except msgspec.DecodeError:
        return True
