"""Joins routes of dialects with the same path: a field of the body selects the route."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from tureen.errors import TureenError
from tureen.http.dialect import Entry


def share(entries: list[Entry]) -> list[Entry]:
    """Return the routes, with each that declares `fields` joined to the route of its path that declares none.

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
    looked_at = sorted({name for guest in guests for name in guest.fields})
    looked = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in looked_at]
    decoder = msgspec.json.Decoder(msgspec.defstruct("Looked", looked))  # makes no objects for other fields

    async def answer(request: Request) -> Any:
        sent = _sent_of(await request.body(), decoder)
        for guest in guests:
            if not sent.isdisjoint(guest.fields):
                try:
                    return await guest.endpoint(request)
                except TureenError as error:
                    return guest.render_error(error)
        return await answer_others(request)

    host.reroute(answer)
    if host.docs is not None:
        bodies = [body for entry in (host, *guests) if entry.docs is not None for body in entry.docs.bodies]
        errors = [entry.docs.error for entry in (host, *guests) if entry.docs is not None]
        host.docs = host.docs._replace(bodies=tuple(bodies), error=next(filter(None, errors), None))


def _sent_of(body: bytes, decoder: msgspec.json.Decoder[Any]) -> set[str]:
    """Return the names of the decoder's fields that a JSON object has and that are not null. Return an empty set for
    anything else, which the host's route refuses."""
    try:
        fields = msgspec.structs.asdict(decoder.decode(body))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return set()
    return {name for name, value in fields.items() if value is not msgspec.UNSET and bytes(value) != b"null"}
