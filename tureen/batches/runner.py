"""Runs all batches that have not ended, those of before the server's start too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tureen.batches.job import MAX_PIECES, MAX_PIECES_OF_CLIENT, Answer, Job, Means
from tureen.batches.records import BatchRecord
from tureen.batches.store import Store
from tureen.batches.turns import Turns
from tureen.errors import Conflict, TureenError
from tureen.log import get_logger

RETRY_S = 30.0
"""Time after which a batch that the disk stopped goes on."""

MAX_FAULTS = 3
"""How often a batch goes on that something else stopped: a fault of the server. Then it fails."""

SWEEP_S = 600.0
"""Time between two looks for files whose time is over."""

log = get_logger("batches")


class BatchRunner:
    """The jobs of all batches. Event-loop thread only."""

    def __init__(
        self,
        store: Store,
        answer: Answer,
        may_begin: asyncio.Event,
        *,
        max_lines: int,
        max_line_bytes: int,
        note: Callable[[int], None],
    ) -> None:
        """`may_begin`: set while lines may begin. `max_lines`: most that run at once, which together have at most
        `max_line_bytes`, as one line has. `note`: hears how many batches have not ended, whenever that changes."""
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._store = store
        self._note = note
        self._means = Means(
            store,
            answer,
            may_begin,
            Turns(max_lines, max_line_bytes),
            Turns(MAX_PIECES, most_of_client=MAX_PIECES_OF_CLIENT),
            Turns(1),
            self._disk,
            max_line_bytes=max_line_bytes,
        )
        self._jobs: dict[str, Job] = {}  # by batch
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def start(self) -> None:
        """Goes on with the batches of before, and removes files when their time is over."""
        for batch in self._store.unended:
            self.add(batch)
        self._spawn(asyncio.create_task(self._sweep_forever()))

    def add(self, batch: BatchRecord) -> None:
        """Begins a batch, or goes on with it."""
        self._jobs[batch.id] = Job(batch, self._means)
        self._note(len(self._jobs))
        if not self._is_stopped:
            self._spawn(asyncio.create_task(self._drive(batch.id)))

    def current(self, batch: BatchRecord) -> BatchRecord:
        """Returns a batch that was saved as it is now."""
        job = self._jobs.get(batch.id)
        return batch if job is None else msgspec.structs.replace(job.batch, counts=job.counts, usage=job.usage)

    async def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Begins to cancel a batch and returns it. Raises Conflict for one that has ended, or is about to."""
        now = self.current(batch)
        if now.has_ended or now.status == "finalizing":
            raise Conflict(f"a batch that is {now.status} cannot be cancelled", code="batch_not_cancellable")
        job = self._jobs[batch.id]
        if now.status != "cancelling":
            await job.cancel()
        return self.current(job.batch)

    def stop(self) -> None:
        """Gives up the lines that run; their batches go on when a server is started with the same folder."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stops, and waits until nothing is written any more."""
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._disk.shutdown)

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self, batch_id: str) -> None:
        """Runs a batch to its end: again and again where the disk stops it, a few times where something else does."""
        num_faults = 0
        while batch_id in self._jobs:
            job = self._jobs[batch_id]
            try:
                await (job.run() if num_faults < MAX_FAULTS else job.give_up())
            except Exception as error:  # other batches go on
                log.exception("batch %s is paused; it resumes in %.0f s", batch_id, RETRY_S)
                num_faults += not _is_of_the_disk(error)
                if num_faults > MAX_FAULTS:
                    log.error("batch %s stays as it is until the server restarts", batch_id)
                    self._forget(batch_id)
                    return
            else:
                log.info("batch %s: %s, %d of %d lines failed", batch_id, job.batch.status, *_failed(job.batch))
                self._forget(batch_id)
                return
            await asyncio.sleep(RETRY_S)
            self._jobs[batch_id] = Job(job.batch, self._means)

    def _forget(self, batch_id: str) -> None:
        del self._jobs[batch_id]
        self._note(len(self._jobs))

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await self._store.sweep(int(time.time()))
            except Exception:  # the disk, again
                log.exception("expired files could not be removed")
            await asyncio.sleep(SWEEP_S)


def _is_of_the_disk(error: BaseException) -> bool:
    """Says whether an error goes when the disk has room again, or can be written."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_of_the_disk, error.exceptions))
    return isinstance(error, OSError) or (isinstance(error, TureenError) and error.code.startswith("storage"))


def _failed(batch: BatchRecord) -> tuple[int, int]:
    return batch.counts.failed, batch.counts.total
