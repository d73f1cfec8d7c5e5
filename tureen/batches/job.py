"""Runs one batch from where it is to its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from tureen.batches.lines import InputCheck, InputLine, LineReader, parse
from tureen.batches.records import BatchRecord, Counts, InputFault, Status, StoredFile
from tureen.batches.results import LineFailure, LineResult, Response, ResultLog, answered, failed
from tureen.batches.store import FULL, Store
from tureen.batches.turns import Turns
from tureen.batches.usage import TokensUsed
from tureen.errors import PayloadTooLarge
from tureen.files import NotRegular
from tureen.log import get_logger

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""How often a line is run at which the server itself fails."""
MAX_PIECES = 32
"""Most pieces of inputs, of SLICE_BYTES, that all batches together hold ahead; and one line that is longer."""
MAX_PIECES_OF_CLIENT = 4
"""Most that the batches of one client hold of them: the others of it wait, and not those of other clients."""

SERVER_FAULT = LineFailure("server_error", "The server failed on this request; its log says why.")
GIVEN_UP = InputFault("server_error", "the server failed on this batch repeatedly; its log says why")
EXPIRED = LineFailure("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = LineFailure("batch_cancelled", "This request was not executed: its batch was cancelled.")
NO_ROOM = LineFailure(FULL, "The answer was not kept: this client's files have reached --max-batch-bytes.")

MISSING = (FileNotFoundError, NotRegular)
NO_INPUT = InputFault("input_file_missing", "the input file is no longer there")

log = get_logger("batches")

Answer = Callable[[BatchRecord, bytes], Awaitable[Response]]
"""A function that runs a line: it gets the batch and the line's body."""


class Means(NamedTuple):
    """The means that all jobs share."""

    store: Store
    answer: Answer
    may_begin: asyncio.Event  # set while lines may begin
    slots: Turns  # of lines that run
    pieces: Turns  # MAX_PIECES
    long_line: Turns  # one
    disk: Executor  # one thread, which alone reads inputs and writes answers
    max_line_bytes: int


class Job:
    """A batch that has not ended. `batch` is its record as it is now."""

    def __init__(self, batch: BatchRecord, means: Means) -> None:
        self.batch = batch
        self._means = means
        self._log: ResultLog | None = None
        self._num_held = 0  # bytes of answers that count for the client's room
        self._pending: list[LineResult] = []
        self._writing = asyncio.Lock()
        self._is_cancelled = asyncio.Event()
        if batch.status == "cancelling":
            self._is_cancelled.set()

    @property
    def counts(self) -> Counts:
        """How many lines are answered now."""
        return self.batch.counts if self._log is None else self._log.counts

    @property
    def usage(self) -> TokensUsed:
        """The tokens of the answers so far."""
        return self.batch.usage if self._log is None else self._log.usage

    async def cancel(self) -> None:
        """Begins no more lines, gives up those that run, and lets the batch end."""
        await self._enter("cancelling")
        self._is_cancelled.set()

    async def run(self) -> None:
        """Returns when the batch has ended. When it is stopped, or raises, another job can go on where this one was.

        Raises OSError, and TureenError of the store.
        """
        try:
            if self.batch.status == "validating" and not await self._in_time(self._validate):
                return
            self._log = await self._on_disk(lambda: ResultLog(self._means.store.contents, self.batch))
            self._settle()
            try:
                if self.batch.status == "in_progress" and not self.batch.is_late:
                    await self._in_time(self._work)
                await self._finish(self._log)
            except* MISSING:
                self.batch = msgspec.structs.replace(self.batch, faults=(NO_INPUT,))
                await self._hand_over("failed", self._log)
        finally:
            if not self.batch.has_ended:
                self._means.store.hold(self.batch.client, -self._num_held)

    async def give_up(self) -> None:
        """Ends a batch that the server cannot run, with the answers so far. Raises as `run`."""
        self._log = await self._on_disk(lambda: ResultLog(self._means.store.contents, self.batch))
        self.batch = msgspec.structs.replace(self.batch, faults=(GIVEN_UP,))
        await self._hand_over("failed", self._log)

    # ---- its parts

    async def _in_time(self, work: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Returns what `work` returns; True when the batch is cancelled or expires before: then it must finish."""
        working = asyncio.ensure_future(work())
        cancelled = asyncio.ensure_future(self._is_cancelled.wait())
        try:
            left_s = max(0.0, self.batch.expires_at - time.time())
            await asyncio.wait({working, cancelled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else True
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)

    async def _validate(self) -> bool:
        """Checks all lines of the input. Returns whether they can run; if not, the batch has failed."""
        check = InputCheck(self.batch.endpoint, self._means.max_line_bytes)
        try:
            async with contextlib.aclosing(self._slices()) as slices:
                async for lines in slices:
                    await self._on_disk(partial(check.add_all, lines))
                    if check.is_over:
                        break
            check.end()
        except MISSING:
            check.faults.append(NO_INPUT)
        if check.faults:
            await self._enter("failed", faults=tuple(check.faults))
            return False
        await self._enter("in_progress", counts=Counts(check.num_lines), ignored=tuple(sorted(check.ignored)))
        return True

    async def _work(self) -> bool:
        """Runs the lines that have no answer yet."""
        assert self._log is not None
        async with asyncio.TaskGroup() as group, contextlib.aclosing(self._slices()) as slices:
            async for lines in slices:
                for number, raw in lines:
                    if number in self._log.done:
                        continue
                    line = parse(number, raw)
                    await self._means.slots.take(self.batch.client, len(raw))
                    task = group.create_task(self._run_line(line))
                    task.add_done_callback(partial(self._free, len(raw)))
        return True

    def _free(self, num_bytes: int, _: object) -> None:
        self._means.slots.free(self.batch.client, num_bytes)

    async def _run_line(self, line: InputLine) -> None:
        store, client = self._means.store, self.batch.client
        try:
            store.check_room(client, 0)
            await self._means.may_begin.wait()
            response = await self._answer(line)
            if response is None:
                result = failed(self.batch, line.number, line.custom_id, SERVER_FAULT)
            else:
                result = answered(self.batch, line.number, line.custom_id, response)
            store.check_room(client, len(result.text))
        except PayloadTooLarge:
            result = failed(self.batch, line.number, line.custom_id, NO_ROOM)
        await self._write(result)

    async def _answer(self, line: InputLine) -> Response | None:
        """Returns the answer to a line; None when the server itself fails at it, each time."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return await self._means.answer(self.batch, line.body)
            except Exception:  # a fault of ours: it stays with this line
                log.exception("batch %s: line %d could not be answered", self.batch.id, line.number)
        return None

    async def _write(self, result: LineResult) -> None:
        """Returns when a result is on the disk, together with those that came meanwhile. Raises OSError."""
        self._pending.append(result)
        async with self._writing:
            results, self._pending = self._pending, []
            if results:
                await self._append(results)

    async def _append(self, results: list[LineResult]) -> None:
        assert self._log is not None
        await self._on_disk(partial(self._log.append, results))
        self._settle()

    def _settle(self) -> None:
        """Counts the answers on the disk for the client's room."""
        assert self._log is not None
        num_bytes = sum(self._log.sizes)
        self._means.store.hold(self.batch.client, num_bytes - self._num_held)
        self._num_held = num_bytes

    async def _finish(self, result_log: ResultLog) -> None:
        """Gives each line that has no answer an error, and the files to the client."""
        is_whole = len(result_log.done) >= result_log.counts.total
        if is_whole and self.batch.status in ("in_progress", "finalizing") and not self.batch.is_late:
            await self._enter("finalizing")
            await self._hand_over("completed", result_log)
            return
        is_cancelled = self.batch.status == "cancelling"
        failure = CANCELLED if is_cancelled else EXPIRED
        await self._enter(self.batch.status, is_late=not is_cancelled)  # before a line says so
        if not is_whole:
            async with contextlib.aclosing(self._slices(at_once=True)) as slices:
                async for lines in slices:
                    left = [parse(number, raw) for number, raw in lines if number not in result_log.done]
                    await self._append([failed(self.batch, line.number, line.custom_id, failure) for line in left])
        await self._hand_over("cancelled" if is_cancelled else "expired", result_log)

    async def _hand_over(self, status: Status, result_log: ResultLog) -> None:
        """Ends the batch: its files become the client's in the same transaction."""
        self._settle()
        batch, now_s = self.batch, int(time.time())
        expires_at = None if batch.output_expires_s is None else now_s + batch.output_expires_s
        ids = (batch.output_id, batch.error_id)
        handed, left_out = list[StoredFile](), list[str]()
        for file_id, kind, size in zip(ids, ("output", "error"), result_log.sizes, strict=True):
            if size:
                name = f"{batch.id}_{kind}.jsonl"
                handed.append(StoredFile(file_id, batch.client, name, "batch_output", size, now_s, expires_at))
            else:
                left_out.append(file_id)
        output, error = (None if file_id in left_out else file_id for file_id in ids)
        ended = batch.now(
            status, now_s, counts=result_log.counts, usage=result_log.usage, output_file_id=output, error_file_id=error
        )
        await self._means.store.save_batch(ended, handed)
        self.batch = ended
        for file_id in left_out:
            with contextlib.suppress(OSError):  # it is empty; the next start removes it
                await self._on_disk(partial(self._means.store.contents.remove, file_id))

    async def _enter(self, status: Status, **changes: Any) -> None:
        """Brings the batch to another status, unless it is being cancelled."""
        if self.batch.status == "cancelling" and status == "in_progress":
            status = "cancelling"
        if self.batch.status != status or changes:
            now_s = self.batch.times.get(status, int(time.time()))
            self.batch = self.batch.now(status, now_s, **changes)
            await self._means.store.save_batch(self.batch)

    # ---- the disk

    async def _slices(self, *, at_once: bool = False) -> AsyncGenerator[list[tuple[int, bytes]], None]:
        """Yields the numbered lines of the input, many at a time; each time when lines may begin, or `at_once`. All
        batches together hold a limited number of pieces and one long line. Raises OSError."""
        read = partial(self._means.store.contents.read, self.batch.input_file_id)
        lines = LineReader(read, self._means.max_line_bytes)
        while not lines.is_at_end:
            if not at_once:
                await self._means.may_begin.wait()
            async with self._means.pieces.turn(self.batch.client):
                piece = await self._on_disk(lines.piece)
                if piece:
                    yield piece
                if lines.is_in_long_line:
                    async with self._means.long_line.turn(self.batch.client):
                        line = await self._on_disk(lines.long_line)
                        if line[1].strip():
                            yield [line]

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._means.disk, work)
