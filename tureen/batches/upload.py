"""Receives a file: its bytes go to the disk as they come."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
from collections.abc import AsyncIterator

from tureen.batches.records import MAX_FILE_BYTES, Purpose, StoredFile, new_id
from tureen.batches.store import Store
from tureen.errors import PayloadTooLarge, TureenError


@contextlib.asynccontextmanager
async def uploading(store: Store, client: str) -> AsyncIterator[Upload]:
    """Makes a file to receive. Unless it is kept before the block ends, nothing of it stays. Raises OSError."""
    file_id = new_id("file-")
    upload = Upload(store, client, file_id, await asyncio.to_thread(store.contents.make, file_id))
    try:
        yield upload
    finally:
        await upload.end()


class Upload:
    """A file that is being received. It counts for its client's room from the first byte on."""

    def __init__(self, store: Store, client: str, file_id: str, file: io.FileIO) -> None:
        self.num_bytes = 0
        self._store = store
        self._client = client
        self._id = file_id
        self._file = file
        self._is_kept = False

    async def write(self, data: bytes) -> None:
        """Appends bytes. Raises PayloadTooLarge when the file, or all of the client's, are too large; OSError."""
        if self.num_bytes + len(data) > MAX_FILE_BYTES:
            raise PayloadTooLarge(f"the file is larger than {MAX_FILE_BYTES} bytes; split it", field="file")
        self._store.check_room(self._client, len(data))
        self._store.hold(self._client, len(data))
        self.num_bytes += len(data)
        await asyncio.to_thread(_write_all, self._file, data)

    async def keep(self, filename: str, purpose: Purpose, lifetime_s: int | None) -> StoredFile:
        """Makes the file a stored one. `lifetime_s`: seconds until it is removed, None = never. Raises PayloadTooLarge
        when the client has too many, OSError."""
        now_s = int(time.time())
        file = StoredFile(
            self._id,
            self._client,
            filename,
            purpose,
            self.num_bytes,
            now_s,
            None if lifetime_s is None else now_s + lifetime_s,
        )
        await asyncio.to_thread(self._synchronise)
        self._is_kept = True  # also if the client has left: the store continues
        try:
            await self._store.add_file(file)
        except TureenError:
            self._is_kept = False
            raise
        return file

    async def end(self) -> None:
        """Closes the file, and removes it if it is not kept."""
        self._file.close()
        if not self._is_kept:
            self._store.hold(self._client, -self.num_bytes)
            await asyncio.shield(asyncio.to_thread(self._store.contents.remove, self._id))

    def _synchronise(self) -> None:
        os.fsync(self._file.fileno())
        self._store.contents.sync()


def _write_all(file: io.FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]
