"""A batch ends as its client was told it would, whatever comes between."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tureen.batches.job import Job, Means
from tureen.batches.records import BatchRecord, StoredFile
from tureen.batches.store import Store
from tureen.batches.turns import Turns

BATCH = BatchRecord(
    id="batch_ab",
    client="",
    endpoint="/v1/completions",
    input_file_id="file-in",
    completion_window="24h",
    created_at=0,
    expires_at=1 << 40,
)


async def fails_if_asked(batch: BatchRecord, body: bytes) -> None:
    raise AssertionError("no line may run")


def test_a_batch_that_ends_while_its_cancelling_is_written_is_cancelled(tmp_path, monkeypatch):
    """The client asked for it, and the file is slow: the batch must not end as one that came too late."""
    store = Store(str(tmp_path / "kept"), 1 << 20)

    async def cancel_and_run() -> BatchRecord:
        may_begin = asyncio.Event()
        may_begin.set()
        with ThreadPoolExecutor(1) as thread:
            means = Means(store, fails_if_asked, may_begin, Turns(1), Turns(1), Turns(1), thread, max_line_bytes=1000)
            await store.add_file(StoredFile("file-in", "", "in.jsonl", "batch", 0, 0))
            await store.add_batch(BATCH)
            job = Job(BATCH, means)
            is_written, save = asyncio.Event(), store.save_batch

            async def save_late(batch: BatchRecord, files: tuple[StoredFile, ...] = ()) -> None:
                if batch.status == "cancelling" and not is_written.is_set():
                    is_written.set()
                    await ended.wait()
                await save(batch, files)

            ended = asyncio.Event()
            monkeypatch.setattr(store, "save_batch", save_late)
            cancelling = asyncio.ensure_future(job.cancel())
            await is_written.wait()
            await job.run()
            ended.set()
            await cancelling
            return job.batch

    batch = asyncio.run(cancel_and_run())
    store.close()
    assert (batch.status, batch.is_late) == ("cancelled", False)
