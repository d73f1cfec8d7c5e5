"""Loads the pictures that `image_data` and `video_data` name, as pixels for the model's encoder.

This is the front's side. It opens files and fetches URLs, but never looks into a picture: a worker of its own
(decode_worker.py) for each prompt does, and its answer is checked here as if it came from the picture's author.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tureen.errors import Forbidden, InvalidRequest, RequestFailed, StartupError, Unavailable
from tureen.media.base import Modality, Prepared
from tureen.media.families import find_family
from tureen.media.fetch import Fetcher
from tureen.media.files import read_below
from tureen.media.references import MAX_BYTES, Inline, Reference, Remote, parse_reference
from tureen.media.wire import LIMITS, SIZE, DecodeJob, DecodeReply, DecoderSetup, Item, Refusal
from tureen.sandbox.supervisor import Supervisor, why_no_helpers
from tureen.sandbox.worker import Lost

PROGRAM = "tureen.media.decode_worker"
MAX_REFERENCES = 64
MAX_PROMPT_BYTES = 64 << 20
"""Bytes of all pictures of a prompt together, as they are stored."""

MAX_DECODES = 2
MAX_FETCHES = 8
"""Most prompts at once that are decoded, and whose pictures are read or fetched; the next ones wait."""

MAX_WAIT_S = 30.0
MAX_GATHER_S = 20.0
REPLY_TIMEOUT_S = 90.0  # longer than a worker lives
MAX_TOKENS = 1 << 20
MAX_MESSAGE_CHARS = 400
MAX_ATTEMPTS = 3  # a fork server that ends is none of the client's doing, nor is one end from outside
START_TIMEOUT_S = 60.0

_reply = msgspec.msgpack.Decoder(DecodeReply)


class PictureSource(NamedTuple):
    """The bytes of a picture's file, or these in base64."""

    data: bytes
    is_base64: bool


class MediaLoader:
    """Loads the pictures of prompts, several prompts at once. Belongs to one event loop."""

    def __init__(
        self,
        hf: Mapping[str, Any],
        preprocessor: Mapping[str, Any],
        *,
        media_path: Path | None,
        allowed_domains: tuple[str, ...],
        max_pixels: int | None = None,
    ) -> None:
        """hf, preprocessor: config.json and preprocessor_config.json of the model. media_path: see files.media_root.
        max_pixels: pictures with more are reduced to at most this number. Raises StartupError."""
        if why := why_no_helpers():
            raise StartupError(f"a vision model cannot be served here: {why}; run tureen on Linux")
        self.family = find_family(hf, preprocessor)
        setup = DecoderSetup(msgspec.json.encode(hf), msgspec.json.encode(preprocessor), max_pixels)
        self.supervisor = Supervisor(
            "the workers that decode pictures", PROGRAM, LIMITS, setup=msgspec.msgpack.encode(setup)
        )
        self._root = media_path
        self._fetcher = Fetcher(allowed_domains)
        self._threads = ThreadPoolExecutor(MAX_DECODES, "decode")
        self._decodes = asyncio.Semaphore(MAX_DECODES)
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._tasks: set[asyncio.Task[list[Prepared]]] = set()
        self._is_closed = False

    async def load(self, references: Sequence[str], modality: Modality, field: str) -> list[Prepared]:
        """Loads the pictures of a prompt: one Prepared for each; for a video one in all, of a film or of pictures that
        are its frames.

        `field`: the client's name for them. Raises InvalidRequest (400 `invalid_image`, `media_fetch_failed`),
        Forbidden (403 `local_media_disabled`, `media_url_forbidden`), Unavailable, RequestFailed.
        """
        self._check(len(references), modality, field)
        names = [_name(field, len(references), index) for index in range(len(references))]
        parsed = [parse_reference(text, name) for text, name in zip(references, names, strict=True)]
        for reference, name in zip(parsed, names, strict=True):
            if isinstance(reference, Remote):
                self._fetcher.check(reference.url, name)
        async with contextlib.AsyncExitStack() as held:
            if not all(isinstance(reference, Inline) for reference in parsed):
                await _enter(self._fetches, field)
                held.callback(self._fetches.release)
            sources = await self._gather(parsed, names, field)
            await _enter(self._decodes, field)
            task = asyncio.create_task(self._decode(sources, modality, field))
            self._tasks.add(task)
            task.add_done_callback(self._end)
            return await asyncio.shield(task)  # a client that goes away frees no place before its process has ended

    async def close(self) -> None:
        """Ends the processes. Loads that are not done fail."""
        self._is_closed = True
        await asyncio.to_thread(self.supervisor.close)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()

    def _check(self, count: int, modality: Modality, field: str) -> None:
        if not 1 <= count <= MAX_REFERENCES:
            raise InvalidRequest(
                f"{field} has {count} pictures; a prompt may have 1 to {MAX_REFERENCES}",
                field=field,
                code="invalid_image",
            )
        if modality == "video" and self.family.video_placeholder is None:
            raise InvalidRequest(f"{field}: this model takes no videos; send pictures", field=field)

    async def _gather(self, references: Sequence[Reference], names: Sequence[str], field: str) -> list[PictureSource]:
        """Returns the bytes of all that a prompt refers to. Raises InvalidRequest, Forbidden."""
        sources: list[PictureSource] = []
        room = MAX_PROMPT_BYTES
        try:
            async with asyncio.timeout(MAX_GATHER_S):
                for reference, name in zip(references, names, strict=True):
                    source = await self._obtain(reference, name)
                    room -= len(source.data) * 3 // 4 if source.is_base64 else len(source.data)
                    if room < 0:
                        raise InvalidRequest(
                            f"{field}: the pictures of a prompt may have {MAX_PROMPT_BYTES >> 20} MiB in all; send "
                            "fewer or smaller ones",
                            field=field,
                            code="invalid_image",
                        )
                    sources.append(source)
        except TimeoutError:
            raise InvalidRequest(
                f"{field} could not be fetched: not all pictures arrived within {MAX_GATHER_S:g} s",
                field=field,
                code="media_fetch_failed",
            ) from None
        return sources

    async def _obtain(self, reference: Reference, name: str) -> PictureSource:
        if isinstance(reference, Inline):
            return PictureSource(reference.base64.encode("ascii", "replace"), is_base64=True)
        if isinstance(reference, Remote):
            return PictureSource(await self._fetcher.fetch(reference.url, name), is_base64=False)
        data = None if self._root is None else await asyncio.to_thread(read_below, self._root, reference.name)
        if data is None:
            raise Forbidden(_no_file(name, has_root=self._root is not None), field=name, code="local_media_disabled")
        return PictureSource(data, is_base64=False)

    async def _decode(self, sources: Sequence[PictureSource], modality: Modality, field: str) -> list[Prepared]:
        job = msgspec.msgpack.encode(
            DecodeJob(
                modality, tuple(len(source.data) for source in sources), tuple(source.is_base64 for source in sources)
            )
        )
        parts = (SIZE.pack(len(job)), job, *(source.data for source in sources))
        ask = partial(self._ask, parts)
        try:
            data = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except RuntimeError:
            raise Unavailable(f"{field}: the system starts no thread to decode it; try again", field=field) from None
        except Lost as lost:
            if self._is_closed:
                raise Unavailable("the server is closing") from None
            if lost.is_outside:
                raise Unavailable(
                    f"{field} could not be decoded: the decoding process was killed more than once; the system does "
                    "so when memory is short: make the picture smaller, or try again later",
                    field=field,
                    code="media_worker_lost",
                ) from None
            if lost.is_blameless or not lost.has_begun:
                raise RequestFailed(f"{field} could not be decoded: no process could be started for it") from None
            raise InvalidRequest(
                f"{field} took too much time or memory, or crashed its decoder; make it smaller, or save it again",
                field=field,
                code="invalid_image",
            ) from None
        return await asyncio.to_thread(_checked, data, modality, field, len(sources))

    def _ask(self, parts: Sequence[bytes]) -> bytes:
        """Returns the reply of a worker for these pictures alone, which is not to be trusted. Raises Lost."""
        for attempt in range(MAX_ATTEMPTS):
            if not self.supervisor.wait_ready(START_TIMEOUT_S):
                break
            try:
                worker = self.supervisor.fork()
            except Lost:
                continue
            try:
                return worker.call(*parts, timeout_s=REPLY_TIMEOUT_S)
            except Lost as lost:
                if not (lost.is_blameless or lost.is_outside) or attempt == MAX_ATTEMPTS - 1:
                    raise
            finally:
                self.supervisor.end(worker)
        raise Lost("no fork server", is_blameless=True)

    def _end(self, task: asyncio.Task[list[Prepared]]) -> None:
        self._decodes.release()
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio logs an exception that is never read, and the client may have left


async def _enter(semaphore: asyncio.Semaphore, field: str) -> None:
    """Raises Unavailable."""
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await semaphore.acquire()
    except TimeoutError:
        raise Unavailable(
            f"{field}: other pictures came first for {MAX_WAIT_S:g} s; try again", field=field, code="media_queue_full"
        ) from None


def _no_file(name: str, *, has_root: bool) -> str:
    """Returns the same message for whatever is not there and whatever may not be read."""
    if not has_root:
        return (
            f"{name} is taken for a file name, and this server reads no files; send base64 or a data: URL, or have it "
            "started with --media-path"
        )
    return (
        f"{name} is taken for a file name, and no such file may be read: it must be a regular file of at most "
        f"{MAX_BYTES >> 20} MiB below --media-path, reached without .. and without symbolic links"
    )


def _checked(data: bytes, modality: Modality, field: str, num_sources: int) -> list[Prepared]:
    """Returns the prepared pictures of a reply, checked. Raises InvalidRequest, RequestFailed."""
    try:
        reply = _reply.decode(data)
    except msgspec.DecodeError:
        reply = DecodeReply()
    if reply.refusal is not None:
        raise _refused(reply.refusal, field, num_sources)
    if len(reply.items) != (1 if modality == "video" else num_sources) or not all(map(_is_sound, reply.items)):
        raise RequestFailed(f"{field} could not be decoded: its process sent an invalid answer", field=field)
    return [
        Prepared(np.frombuffer(item.pixels, np.uint8).reshape(item.shape), item.num_tokens, item.layout)
        for item in reply.items
    ]


def _is_sound(item: Item) -> bool:
    return (
        min(item.shape) > 0
        and item.shape[3] == 3
        and math.prod(item.shape) == len(item.pixels)
        and 0 < item.num_tokens <= MAX_TOKENS
    )


def _refused(refusal: Refusal, field: str, num_sources: int) -> InvalidRequest | RequestFailed:
    name = _name(field, num_sources, refusal.index)
    message = f"{name} {''.join(ch if ch.isprintable() else '?' for ch in refusal.message[:MAX_MESSAGE_CHARS])}"
    if refusal.is_ours:
        return RequestFailed(message, field=name)
    return InvalidRequest(message, field=name, code="invalid_image")


def _name(field: str, count: int, index: int | None) -> str:
    return field if count == 1 or index is None or not 0 <= index < count else f"{field}[{index}]"
