"""Decides whether a response of OpenAI's `/v1/responses` is kept, and what it continues."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.requests import Request

from tureen.dialects.openai.responses_body import ResponsesBody
from tureen.dialects.openai.responses_input import ResponsesItem, ResponsesReference, kept_items, read_items
from tureen.errors import InvalidRequest, NotFound, TureenError, echo
from tureen.fields import ignored
from tureen.fields.body import convert
from tureen.http.dialect import client_name
from tureen.log import get_logger
from tureen.requests.state import ServerState

if TYPE_CHECKING:
    from tureen.storage.responses import Continued, ResponseStore

NOTHING_KEPT = "this server keeps no responses; start it with --responses-store PATH"

log = get_logger("api")


class Keeping(NamedTuple):
    """How one response is kept."""

    store: ResponseStore
    owner: str
    asked: list[dict[str, Any]]  # the items of its own input
    continued: Continued  # what it continues
    is_kept: bool  # else it continues something, and is not kept itself

    async def add(self, response: dict[str, Any]) -> None:
        """Keeps a response that has ended, or that begins in the background."""
        if self.is_kept:
            await self.store.add(self.owner, response, self.asked, self.continued)

    def add_later(self, response: dict[str, Any]) -> None:
        """Keeps a response that no client waits for: its client has left, or an error ended it."""
        task = asyncio.create_task(self._add_quietly(response))
        self.store.background.add(task)
        task.add_done_callback(self.store.background.discard)

    async def _add_quietly(self, response: dict[str, Any]) -> None:
        try:
            await self.add(response)
        except TureenError as error:
            log.error("a response that did not come to its end could not be kept: %s", error.message)

    async def drop(self, response: dict[str, Any]) -> None:
        """Forgets a response that was kept, and does not begin after all."""
        await self.store.delete(self.owner, response["id"])


def store_of(state: ServerState) -> ResponseStore:
    """Returns the server's store. Raises InvalidRequest where there is none."""
    if state.recordings.responses is None:
        raise InvalidRequest(NOTHING_KEPT, code="not_available")
    return state.recordings.responses


async def keeping_of(body: ResponsesBody, num_bytes: int, request: Request, state: ServerState) -> Keeping | None:
    """Returns how a response is kept, None when nothing of it is. `num_bytes`: of the body, and of the items
    that it names.

    Raises InvalidRequest for fields that need what is not there, NotFound, PayloadTooLarge.
    """
    store = state.recordings.responses
    if store is None:
        _refuse_all(body)
        return None
    is_kept = body.store is not False
    if not is_kept:
        for name in ("background", "conversation"):
            if getattr(body, name):
                raise InvalidRequest(f"{name} needs store: true, because it keeps the response", field=name)
    if body.previous_response_id is not None and body.conversation is not None:
        raise InvalidRequest(
            "previous_response_id and conversation cannot go together: a response continues only one of them",
            field="conversation",
        )
    if not is_kept and body.previous_response_id is None:
        return None
    owner = client_name(request)
    if is_kept:
        store.check_size(num_bytes)
        if body.rid is not None or body.request_id is not None:
            await store.check_free(owner, body.rid or body.request_id or "")
    continued = await store.continued(owner, previous=body.previous_response_id, conversation=conversation_id(body))
    return Keeping(store, owner, kept_items(body.input), continued, is_kept)


async def with_references(body: ResponsesBody, request: Request, state: ServerState) -> tuple[ResponsesBody, int]:
    """Returns a body with the kept items in place of those that its input only names, and the bytes of these. Raises
    InvalidRequest where nothing is kept, NotFound, PayloadTooLarge."""
    items = body.input if isinstance(body.input, list) else []
    places = {index: item.id for index, item in enumerate(items) if isinstance(item, ResponsesReference)}
    if not places:
        return body, 0
    store = state.recordings.responses
    if store is None:
        field = f"input[{min(places)}].type"
        raise InvalidRequest(f"{field} item_reference: {NOTHING_KEPT}", field=field, code="not_available")
    known, num_bytes = await store.items_named(client_name(request), list(places.values()))
    for index, name in places.items():
        if name not in known:
            raise NotFound(
                f"input[{index}].id: no item {echo(name)} is among the newest that are kept; send the item itself",
                field=f"input[{index}].id",
                code="item_not_found",
            )
    referenced = convert(read_items([known[name] for name in places.values()]), list[ResponsesItem])
    named = dict(zip(places, referenced, strict=True))
    return msgspec.structs.replace(body, input=[named.get(index, item) for index, item in enumerate(items)]), num_bytes


def conversation_id(body: ResponsesBody) -> str | None:
    """Returns the id of the conversation that a body names, None without one."""
    named = body.conversation
    return named if named is None or isinstance(named, str) else named.id


def _refuse_all(body: ResponsesBody) -> None:
    """Raises InvalidRequest for what needs a store; `store: true` alone changes nothing that the client gets now, and
    is told."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not available: {NOTHING_KEPT}", field=name, code="not_available")
    if body.store:
        ignored.tell("store", NOTHING_KEPT)
