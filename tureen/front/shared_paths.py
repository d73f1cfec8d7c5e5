"""Joins the routes of dialects that have the same path: a field of the body says whose route answers it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from tureen.errors import TureenError
from tureen.http.dialect import Entry

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def share(entries: list[Entry]) -> list[Entry]:
    """Return the routes with those that declare `fields` joined to the route that has their path to itself.

    Raises ValueError for a route with `fields` whose path has no other route.
    """
    alone = [entry for entry in entries if not entry.fields]
    for path in dict.fromkeys(entry.path for entry in entries if entry.fields):
        guests = [entry for entry in entries if entry.fields and entry.path == path]
        hosts = [entry for entry in alone if entry.path == path and "POST" in (entry.methods or ())]
        if len(hosts) != 1:
            raise ValueError(f"{path} has {len(hosts)} routes that take every body; a route with fields needs one")
        _join(hosts[0], guests)
    return alone


def _join(host: Entry, guests: list[Entry]) -> None:
    answer_others = host.endpoint

    async def answer(request: Request) -> ASGIApp:
        sent = _fields_of(await request.body())
        for guest in guests:
            if not sent.isdisjoint(guest.fields):
                try:
                    chosen: ASGIApp = await guest.endpoint(request)
                except TureenError as error:
                    return guest.render_error(error)
                return chosen
        others: ASGIApp = await answer_others(request)
        return others

    host.reroute(answer)
    if host.docs is not None:
        bodies = (
            *host.docs.bodies,
            *(body for guest in guests if guest.docs is not None for body in guest.docs.bodies),
        )
        host.docs = host.docs._replace(bodies=bodies)


def _fields_of(body: bytes) -> frozenset[str]:
    """Return the names of a JSON object's fields that are not null; none for anything else, which the host's route
    refuses."""
    try:
        return frozenset(name for name, value in _members.decode(body).items() if bytes(value) != b"null")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return frozenset()
