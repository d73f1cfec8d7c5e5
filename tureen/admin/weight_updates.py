"""Updates of weights that a trainer sends: begun, filled part by part, and served or dropped as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from tureen.admin.weight_exchange import ExchangeOptions, NewSource, WeightExchange, note_failure, success
from tureen.config import cache_dir
from tureen.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StartupError,
    Unavailable,
    echo,
)
from tureen.log import get_logger
from tureen.requests.state import ServerState
from tureen.runner.received import Announced, ReceivedWeights
from tureen.weights.safetensors import header_of
from tureen.weights.source import ModelSource, resolve_model

PIECE_BYTES = 1 << 20
IDLE_S = 60.0
"""Seconds without a part after which another trainer may begin: the one before has probably died."""

log = get_logger("api")


class WeightUpdates:
    """The update of one model that is open, if there is one."""

    def __init__(self, state: ServerState, exchange: WeightExchange) -> None:
        self._state = state
        self._exchange = exchange
        self._open: ReceivedWeights | None = None
        self._is_ending = False
        self._touched_s = 0.0

    async def begin(self) -> None:
        """Open an update. Raise Conflict if one is open to which something was sent lately."""
        self._check(ExchangeOptions())
        if self._open is not None:
            idle_s = time.monotonic() - self._touched_s
            if idle_s < IDLE_S or self._open.num_arriving:
                raise Conflict(
                    f"an update is open; its last part arrived {idle_s:.0f} s ago. End it by /end_weight_update, drop "
                    f"it by /abort_weight_update, or wait until it is {IDLE_S:.0f} s idle",
                    code="update_open",
                )
            log.warning("an update of weights that was never ended is dropped")
            self._drop()
        received = await self._receiver()
        if self._open is not None:  # another client began meanwhile
            received.close()
            raise Conflict("another client has begun an update just now", code="update_open")
        self._open, self._touched_s = received, time.monotonic()

    def abort(self) -> bool:
        """Drop the open update. Return whether there was one. Raise Conflict while its weights are being served."""
        self._check_not_ending()
        was_open = self._open is not None
        self._drop()
        return was_open

    @contextlib.asynccontextmanager
    async def part(self, options: ExchangeOptions, *, is_partial: bool) -> AsyncIterator[ArrivingPart]:
        """Take a part of the open update. Without an open update, the part is an update of its own, which is served
        when the block ends.

        is_partial: an update of its own may lack weights, which keep their values. Raise InvalidRequest, Conflict,
        Unavailable; then nothing has changed.
        """
        self._check(options)
        received = self._open
        if received is not None:
            part = ArrivingPart(received)
            with self._arriving(received), contextlib.closing(part):
                yield part
            return
        part = ArrivingPart(await self._receiver())
        try:
            yield part
        except BaseException:
            part.received.close()
            raise
        part.num_paused = await self._serve(part.received, options, is_partial=is_partial)

    async def end(self, options: ExchangeOptions, *, is_partial: bool) -> int:
        """Serve the weights of the open update. Return the number of paused requests that go on with them. Raise
        InvalidRequest for missing weights, and Conflict while a part is being sent: the update stays open."""
        self._check(options)
        received = self._open
        if received is None:
            raise Conflict("no update is open; begin one by /begin_weight_update", code="no_update")
        if received.num_arriving:
            raise Conflict(
                f"{received.num_arriving} parts of the update are being sent; end it after the answers to them",
                code="part_arriving",
            )
        return await self._serve(received, options, is_partial=is_partial)

    def arrived(self, part: ArrivingPart, options: ExchangeOptions) -> dict[str, Any]:
        """Returns the answer to the client of a part."""
        if part.num_paused is not None:
            return success(part.num_paused, options, self._state)
        num_missing = len(part.received.missing)
        tensors = "1 tensor" if part.num_tensors == 1 else f"{part.num_tensors} tensors"
        missing = "1 weight is" if num_missing == 1 else f"{num_missing} weights are"
        message = f"{tensors} arrived, and {missing} missing until the update is ended."
        return {"success": True, "message": message, "num_missing": num_missing}

    def success(self, message: str, num_paused: int, options: ExchangeOptions) -> dict[str, Any]:
        """Returns the answer to a client that ended an update."""
        answer = success(num_paused, options, self._state)
        return answer | {"message": f"{message}. {answer['message']}"}

    def check_possible(self) -> None:
        """Raise NotFound or InvalidRequest for a server that cannot take weights from a client."""
        config = self._state.context.config
        if self._state.context.info.kind != "generator":
            raise NotFound(
                "a model that makes embeddings or scores keeps its weights; start the server again with the others"
            )
        if isinstance(config.replicas, str):
            raise InvalidRequest(
                "engines on other machines take weights from files only: write a checkpoint that they can read, and "
                "name it to /update_weights_from_disk",
                code="not_supported",
            )
        if self._state.media is not None or config.model_impl == "transformers":
            raise InvalidRequest(
                "this server cannot exchange weights while it runs: --model-impl transformers cannot, nor can models "
                "that see; start it again with the other model",
                code="not_supported",
            )

    def start(self) -> None:
        """Do nothing: an update begins with a request."""

    def drain(self) -> None:
        """Drop the open update: its end would be refused."""
        self._drop()

    async def close(self) -> None:
        """Remove all files."""
        self._drop()
        self._exchange.close()

    def _base(self) -> ModelSource:
        """Return the model that is served. Raise StartupError."""
        path, folder = self._state.context.info.model_path, cache_dir(self._state.context.config)
        return self._exchange.source or resolve_model(path, cache_dir=folder)

    async def _receiver(self) -> ReceivedWeights:
        """Return a place for new weights. Raise Unavailable."""
        try:
            return await asyncio.to_thread(lambda: ReceivedWeights(self._base()))
        except (StartupError, OSError, ValueError) as error:
            log.warning("no weights can be received: %s", error)
            raise Unavailable("the weights have no place to arrive at; the server's log says why") from None

    @contextlib.contextmanager
    def _arriving(self, received: ReceivedWeights) -> Iterator[None]:
        """Count a part that is being sent. Raise Conflict if its update was dropped meanwhile."""
        received.num_arriving += 1
        try:
            yield
        except OSError:
            if self._open is received:
                raise
        finally:
            received.num_arriving -= 1
            self._touched_s = time.monotonic()
        if self._open is not received:
            raise Conflict("the update was dropped while this part arrived; begin it again", code="update_dropped")

    def _check(self, options: ExchangeOptions) -> None:
        """Raise NotFound, InvalidRequest or Conflict for a request that cannot be done here and now."""
        self.check_possible()
        options.check(self._state)
        self._check_not_ending()

    def _check_not_ending(self) -> None:
        if self._is_ending:
            raise Conflict("the update is being ended; wait for the answer to that", code="update_ending")

    def _drop(self) -> None:
        if self._open is not None and not self._is_ending:
            self._open.close()
            self._open = None

    async def _serve(self, received: ReceivedWeights, options: ExchangeOptions, *, is_partial: bool) -> int:
        """Serve what has arrived, even if the client that sent it leaves. Files that are not served are removed, unless
        the update is still open."""

        def source() -> ModelSource:
            is_dummy = self._exchange.load_format == "dummy"
            return received.source(self._base(), is_partial=is_partial, is_dummy=is_dummy)

        async def prepare() -> NewSource:
            new = await asyncio.to_thread(source)
            return NewSource(source=new, folder=received.folder, load_format="auto")

        async def serve() -> int:
            is_open = received is self._open
            self._is_ending = is_open or self._is_ending
            try:
                return await self._exchange.run(prepare, options)
            finally:
                is_served = self._exchange.folder is received.folder  # even if something failed after that
                if is_open and is_served:
                    self._open = None
                elif not is_open and not is_served:
                    received.close()
                self._is_ending = self._is_ending and not is_open
                self._touched_s = time.monotonic()

        serving = asyncio.ensure_future(serve())
        serving.add_done_callback(note_failure)
        return await asyncio.shield(serving)


class ArrivingPart:
    """A part of an update that arrives. Close it: its bytes count as arriving until then."""

    def __init__(self, received: ReceivedWeights) -> None:
        self.received = received
        self.num_tensors = 0
        self._num_reserved = 0
        self.num_paused: int | None = None  # requests that go on with the weights; None: they are not served yet

    async def write(self, pieces: AsyncIterator[bytes], declared: int, sha256: str | None) -> None:
        """Write a safetensors body and check it.

        declared: bytes that the client says it sends; 0 = it does not say. Raise InvalidRequest, PayloadTooLarge,
        Unavailable.
        """
        self.reserve(declared)
        self.check_disk(declared)
        path = self.received.new_part()
        try:
            sum_of_body = await self._written(pieces, path, is_summed=sha256 is not None)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _no_room(error) from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if sha256 is not None and sum_of_body != sha256.lower():
            path.unlink(missing_ok=True)
            raise InvalidRequest(
                f"sha256 is {echo(sha256)}, but the body that arrived has {sum_of_body}; send it again",
                field="sha256",
                code="checksum_mismatch",
            )
        self.num_tensors += await asyncio.to_thread(self.received.add, path)
        self.close()

    async def _written(self, pieces: AsyncIterator[bytes], path: Path, *, is_summed: bool) -> str:
        """Write a body to a file. Return its SHA-256, or "". Raise PayloadTooLarge, OSError."""
        digest, num_bytes, waiting = hashlib.sha256(), 0, bytearray()

        def flush() -> None:
            file.write(waiting)
            if is_summed:
                digest.update(waiting)

        with path.open("wb") as file:
            async for piece in pieces:
                num_bytes += len(piece)
                self.reserve(max(num_bytes, self._num_reserved))
                waiting += piece
                if len(waiting) >= PIECE_BYTES:
                    await asyncio.to_thread(flush)  # a disk may take its time
                    waiting.clear()
            await asyncio.to_thread(flush)
        return digest.hexdigest() if is_summed else ""

    def close(self) -> None:
        """Count its bytes no longer as arriving."""
        self.received.num_arriving_bytes -= self._num_reserved
        self._num_reserved = 0

    async def fill(self, tensors: list[Announced], receive: Callable[[str], Awaitable[None]]) -> None:
        """Check tensors, have `receive` append their bytes to a file, and check that. Raise InvalidRequest,
        PayloadTooLarge, Unavailable."""
        await asyncio.to_thread(self.received.check, tensors)
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self.reserve(num_bytes)
        self.check_disk(num_bytes)
        path = self.received.new_part()
        try:
            path.write_bytes(header_of(tensors))
            await receive(str(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _no_room(error) from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.num_tensors += await asyncio.to_thread(self.received.add, path)
        self.close()

    def reserve(self, num_bytes: int) -> None:
        """Count the bytes of this part. Raise PayloadTooLarge if it makes the update too large."""
        received = self.received
        left = received.max_bytes - received.num_bytes - received.num_arriving_bytes + self._num_reserved
        if num_bytes > left:
            raise PayloadTooLarge(
                f"the body has {num_bytes} bytes, and {left} are left of the {received.max_bytes} that the "
                "weights of an update may have: as many as the model in float32"
            )
        received.num_arriving_bytes += num_bytes - self._num_reserved
        self._num_reserved = num_bytes

    def check_disk(self, num_bytes: int) -> None:
        """Raise Unavailable if the disk has no room for this part."""
        if num_bytes > shutil.disk_usage(self.received.folder.path).free:
            raise _no_room(None)


def _no_room(error: OSError | None) -> Unavailable:
    """Returns the error for a part that cannot be written."""
    log.warning("weights cannot be written: %s", error or "the disk is full")
    return Unavailable(
        "the disk has no room for these weights; free some, or start the server with TMPDIR set to a folder that has",
        code="no_room",
        retry_after_s=10,
    )
