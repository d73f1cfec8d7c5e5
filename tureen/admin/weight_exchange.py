"""Exchanges the weights of a running model: waits for requests to end, or rolls through the replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tureen.errors import InvalidRequest, TureenError
from tureen.http.errors import error_answer, error_object
from tureen.log import get_logger
from tureen.requests.state import ServerState
from tureen.temporary_folder import TemporaryFolder
from tureen.weights.source import ModelSource

POLL_S = 0.02

log = get_logger("api")

Version = Annotated[
    Annotated[str, Meta(max_length=256)] | None,
    Meta(description="Version that answers report from then on. Default: unchanged."),
]


class ExchangeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that every route that exchanges weights has."""

    abort_all_requests: Annotated[
        bool, Meta(description="Abort all requests; otherwise the server waits for the running ones.")
    ] = False
    rolling: Annotated[
        bool, Meta(description="Replace the weights of one replica after the other, while the others serve requests.")
    ] = False
    weight_version: Version = None
    keep_pause: Annotated[bool, Meta(description="Pause generation afterwards, until /continue_generation.")] = False
    torch_empty_cache: Annotated[bool, Meta(description="Release the old weights' memory; the server always does.")] = (
        False
    )

    def check(self, state: ServerState) -> None:
        """Raise InvalidRequest for options that exclude each other, and for `rolling` without replicas."""
        for name in ("abort_all_requests", "keep_pause"):
            if self.rolling and getattr(self, name):
                raise InvalidRequest(
                    f"{name} and rolling exclude each other: rolling neither aborts nor pauses requests; leave one out",
                    field=name,
                )
        if self.rolling and not state.client.replicas:
            raise InvalidRequest(
                "rolling needs several engines: start the server with --replicas 2, or leave it out", field="rolling"
            )


class NewSource(msgspec.Struct, frozen=True, kw_only=True):
    """New weights: their files, and how they are read and reported."""

    source: ModelSource
    load_format: str | None = None
    model_path: str | None = None  # as clients see it; None = unchanged
    folder: TemporaryFolder | None = None  # of files that this server wrote

    def place(self) -> dict[str, Any]:
        """Returns where the weights are, as the engine's operation `update_weights` takes it."""
        source = self.source
        return {
            "name": source.name,
            "path": str(source.path),
            "format": source.format,
            "load_format": self.load_format,
        }


Prepare = Callable[[], Awaitable[NewSource]]


class WeightExchange:
    """Exchanges the weights of one model, one update at a time."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._turn = asyncio.Lock()
        self.folder: TemporaryFolder | None = None  # of the weights that are served, if this server wrote them
        self.source: ModelSource | None = None  # of the last update; None = there was none
        self.load_format: str = state.context.config.load_format  # of the weights that are served

    async def run(self, prepare: Prepare, options: ExchangeOptions) -> int:
        """Serves other weights. Returns the number of paused requests that continue with them. Raises InvalidRequest;
        then nothing has changed.

        prepare: returns the new weights; called when no other update is under way, so that it may use those that are
        served. Cancelling ends the wait for running requests, but not an update that has begun.
        """
        change = self._roll if options.rolling else self._update
        return await change(prepare, options)

    def close(self) -> None:
        """Remove the files of weights that this server wrote."""
        if self.folder is not None:
            self.folder.close()
            self.folder = None

    async def _update(self, prepare: Prepare, options: ExchangeOptions) -> int:
        """Wait until running requests have ended, unless they are paused; no request begins meanwhile. An update that
        has begun keeps the lock of updates and the hold on requests, even if this is cancelled."""
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self._turn)
            new = await prepare()
            if options.abort_all_requests:
                abort_all(self._state)
            held.push_async_callback(self._let_go)
            while await self._state.client.call("hold"):
                await asyncio.sleep(POLL_S)
            installing = asyncio.ensure_future(self._install(new, options, held.pop_all()))
            installing.add_done_callback(note_failure)
            return await asyncio.shield(installing)

    async def _let_go(self) -> None:
        with contextlib.suppress(TureenError):  # an engine that has ended holds nothing
            await self._state.client.call("let_go")

    async def _install(self, new: NewSource, options: ExchangeOptions, held: contextlib.AsyncExitStack) -> int:
        """Do the update itself, and release `held`, the lock and the hold, at its end."""
        state = self._state
        async with held:
            num_paused = await state.client.call("update_weights", **new.place())
            self._note(new, options)
            if options.keep_pause:
                await state.client.call("pause", mode="retract")
            if state.common.fronts is not None:
                await state.common.fronts.tell()  # before requests go on, and answers say what computed them
        assert isinstance(num_paused, int)
        return num_paused

    async def _roll(self, prepare: Prepare, options: ExchangeOptions) -> int:
        """Load the weights into one replica after the other. What has begun goes on when this is cancelled, so that all
        replicas have the same weights in the end."""

        async def exchange() -> int:
            async with self._turn:
                new = await prepare()
                call = self._state.client.call("roll_weights", version=options.weight_version, **new.place())
                num_paused = await call
                self._note(new, options)
                assert isinstance(num_paused, int)
                return num_paused

        return await asyncio.shield(exchange())

    def _note(self, new: NewSource, options: ExchangeOptions) -> None:
        """Report the new weights from now on. Remove the files of the old ones if this server wrote them."""
        self._state.serve_weights(path=new.model_path, version=options.weight_version)
        self.close()
        self.folder, self.source = new.folder, new.source
        self.load_format = new.load_format or self._state.context.config.load_format


def success(num_paused: int, options: ExchangeOptions, state: ServerState) -> dict[str, Any]:
    """Returns the answer to a client whose weights are served now."""
    message = "Succeeded to update model weights."
    if options.weight_version is not None:
        message += f" Weight version updated to {options.weight_version}."
    if num_paused:
        continuing = "1 paused request continues" if num_paused == 1 else f"{num_paused} paused requests continue"
        message += f" {continuing} with them, recomputed from their first token."
    answer = {"success": True, "message": message, "num_paused_requests": num_paused}
    return answer | _restarted(state, message)


def not_updated(error: TureenError) -> Response:
    """Returns an error with the fields that SGLang's clients read beside our own."""
    return _failed(error, getattr(error, "summary", f"Failed to update weights: {error.message}"))


def group_failed(error: TureenError) -> Response:
    """Returns an error about a process group in the same form."""
    return _failed(error, error.message)


def _failed(error: TureenError, message: str) -> Response:
    return error_answer(error, {"success": False, "message": message, "num_paused_requests": 0} | error_object(error))


def abort_all(state: ServerState) -> None:
    """End all requests that use the weights, of all fronts."""
    state.abort(None, "weights")
    if state.common.fronts is not None:
        state.common.fronts.abort_all("weights")


def _restarted(state: ServerState, message: str) -> dict[str, Any]:
    """Returns what an answer says of replicas that were restarted with the weights; nothing if there are none."""
    faults = {replica.number: replica.weights_fault for replica in state.client.replicas if replica.weights_fault}
    if not faults:
        return {}
    told = "; ".join(f"replica {number}: {fault}" for number, fault in faults.items())
    return {
        "message": f"{message} Some replicas could not load them, and are restarted with them: {told}",
        "restarted_replicas": list(faults),
    }


def note_failure(installing: asyncio.Future[int]) -> None:
    """Log why an update failed: its client may have left."""
    if not installing.cancelled() and (error := installing.exception()) is not None:
        log.info("the weights were not updated: %s", error)
