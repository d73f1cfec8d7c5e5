"""Chooses the model that a request is for, and waits until it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from tureen.errors import Unavailable
from tureen.http.call import call_of, until_gone
from tureen.http.dialect import BYTES_PER_CHAR, ClientGone, Entry
from tureen.multi_model.fleet import Fleet
from tureen.multi_model.member import Member
from tureen.requests.model_field import unknown_model
from tureen.requests.offload import offload

NAMES = ("model", "name")
"""Fields by which bodies name a model."""

LIMITS = ("deadline_ms", "ttft_deadline_ms")


class AskedFor(msgspec.Struct):
    """The fields of a body that matter before it is read."""

    model: Any = None
    name: Any = None
    deadline_ms: Any = None
    ttft_deadline_ms: Any = None

    @property
    def named(self) -> str | None:
        return next((name for name in (self.model, self.name) if isinstance(name, str)), None)

    @property
    def limit_s(self) -> float | None:
        """The time in which the first token must be there; None = no limit."""
        limits = [limit for limit in (self.deadline_ms, self.ttft_deadline_ms) if isinstance(limit, int)]
        return max(0, min(limits)) / 1000 if limits else None


NOTHING_ASKED = AskedFor()
_decode = msgspec.json.Decoder(AskedFor).decode


def spread(entries: Iterable[Entry], fleet: Fleet) -> None:
    """Makes each route pass a request on to the route of the model that its body, query or path names."""
    for index, entry in enumerate(entries):
        entry.reroute(_chooser(entry, index, fleet))


def _names_model(entry: Entry) -> bool:
    """Says whether bodies of a route name the model that it is for. Those of operators may name one to act on."""
    bodies = () if entry.docs is None or entry.access == "admin" else entry.docs.bodies
    return any(field.encode_name in NAMES for body in bodies for field in msgspec.structs.fields(body))


def _chooser(entry: Entry, index: int, fleet: Fleet) -> Callable[..., Any]:
    """Returns the endpoint of a route that passes requests on. `entry`: the default model's; `index`: its place among
    the routes."""
    own, reads_body, needs_engine = entry.endpoint, _names_model(entry), entry.needs_engine

    async def choose(request: Request) -> ASGIApp:
        asked = request.query_params.get("model") or request.path_params.get("model")
        choice = await _read(request) if reads_body else NOTHING_ASKED
        named = choice.named or asked
        if named is None and not reads_body:
            answer: ASGIApp = await own(request)
            return answer
        member = fleet.default if named is None else fleet.find(named)
        if member is None:
            if choice.named is None:
                raise unknown_model(named or "", fleet.names())
            answer = await own(request)  # which knows what its API says to that
            return answer
        if not needs_engine and member.state is not None:
            answer = await member.entries[index].endpoint(request)
            return answer
        async with _using(fleet, member, request, choice.limit_s):
            answer = await member.entries[index].endpoint(request)
            return answer

    return choose


async def _read(request: Request) -> AskedFor:
    """Reads what a body says of its model. A faulty body says nothing: its route finds the fault."""
    body = await request.body()

    def decode() -> AskedFor:
        try:
            return _decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return NOTHING_ASKED

    return await offload.run(len(body) // BYTES_PER_CHAR, decode)


@contextlib.asynccontextmanager
async def _using(fleet: Fleet, member: Member, request: Request, limit_s: float | None) -> AsyncIterator[None]:
    """Holds a model that is loaded until the answer begins. Raises Unavailable, ClientGone."""
    call = call_of(request.scope)
    waiter = None
    if member.is_ready:
        member.enter()
    else:
        waiter = fleet.wait_for(member)
    try:
        if waiter is not None:
            await request.body()  # kept; a wait for the client's leaving would take it
            await _wait(waiter.done, request, limit_s)
            if call.work is not None:
                call.work.load_wait_s = asyncio.get_running_loop().time() - waiter.since_s
        call.answered_by = member.state
        yield
    finally:
        fleet.release(member, waiter)


async def _wait(done: asyncio.Future[None], request: Request, limit_s: float | None) -> None:
    """Raises Unavailable when the model cannot be loaded, or not in time; ClientGone."""
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({done, leaving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
    if done.done():
        done.result()
    elif leaving.done():
        raise ClientGone
    else:
        raise Unavailable(
            f"the deadline cannot be met: the model was not loaded within {round((limit_s or 0) * 1000)} ms; try again "
            "later",
            field="deadline_ms",
            code="deadline_unreachable",
        )
