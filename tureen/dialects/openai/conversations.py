"""Serves OpenAI's `/v1/conversations`, lists of items that responses continue.

Source: https://platform.openai.com/docs/api-reference/conversations
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tureen.dialects.openai.body import Label
from tureen.dialects.openai.item_pages import INCLUDE, page, query_of
from tureen.dialects.openai.responses_input import ResponsesItem, ResponsesReference, kept_items, read_items
from tureen.dialects.openai.responses_keeping import NOTHING_KEPT, store_of
from tureen.errors import InvalidRequest, NotFound
from tureen.fields.body import convert, offered
from tureen.fields.rules import FieldTable
from tureen.http.dialect import Docs, Entry, client_name, read_body_with
from tureen.requests.state import ServerState

if TYPE_CHECKING:
    from tureen.storage.conversations import ConversationStore

MAX_ITEMS = 20
"""Items of one request, as OpenAI has it."""

PATH = "/v1/conversations"
ONE, ITEMS = f"{PATH}/{{conversation_id}}", f"{PATH}/{{conversation_id}}/items"

Items = Annotated[list[ResponsesItem], Meta(max_length=MAX_ITEMS, description="Items as /v1/responses takes them.")]
Notes = Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16, description="Your metadata.")]

TABLE = FieldTable(tells_unknown=True)
Body = TypeVar("Body", bound=msgspec.Struct)

_encode = msgspec.json.Encoder().encode


class ConversationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/conversations`."""

    items: Items = []
    metadata: Notes = {}


class ConversationNotesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/conversations/{id}`."""

    metadata: Notes


class ConversationItemsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/conversations/{id}/items`."""

    items: Annotated[Items, Meta(min_length=1)]


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def create(request: Request) -> Response:
        body = await read_body_with(request, lambda payload: _read(payload, ConversationBody))
        store = store_of(state).conversations
        name = f"conv_{uuid.uuid4().hex}"
        return _answer(await store.add(client_name(request), name, body.metadata, _own(body.items)))

    async def get(request: Request) -> Response:
        return _answer(await _store(state).find(*_named(request)))

    async def describe(request: Request) -> Response:
        body = await read_body_with(request, lambda payload: _read(payload, ConversationNotesBody))
        return _answer(await _store(state).describe(*_named(request), body.metadata))

    async def delete(request: Request) -> Response:
        await _store(state).delete(*_named(request))
        return _answer({"id": _named(request)[1], "object": "conversation.deleted", "deleted": True})

    async def add_items(request: Request) -> Response:
        query_of(request, INCLUDE)
        items = _own((await read_body_with(request, lambda payload: _read(payload, ConversationItemsBody))).items)
        await _store(state).add_items(*_named(request), items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return _answer({"object": "list", "data": items, **ends, "has_more": False})

    async def list_items(request: Request) -> Response:
        return _answer(page(await _store(state).items(*_named(request)), request))

    async def get_item(request: Request) -> Response:
        query_of(request, INCLUDE)
        return _answer(await _store(state).item(*_named(request), request.path_params["item_id"]))

    async def delete_item(request: Request) -> Response:
        store = _store(state)
        await store.delete_item(*_named(request), request.path_params["item_id"])
        return _answer(await store.find(*_named(request)))

    example = {"items": [{"type": "message", "role": "user", "content": "Hello."}]}
    return [
        _entry("POST", PATH, create, "Create a conversation.", ConversationBody, example),
        _entry("GET", ONE, get, "Get a conversation."),
        _entry("POST", ONE, describe, "Replace its metadata.", ConversationNotesBody, {"metadata": {"topic": "x"}}),
        _entry("DELETE", ONE, delete, "Delete a conversation."),
        _entry("POST", ITEMS, add_items, "Append items.", ConversationItemsBody, example),
        _entry("GET", ITEMS, list_items, "List a conversation's items."),
        _entry("GET", f"{ITEMS}/{{item_id}}", get_item, "Get an item of a conversation."),
        _entry("DELETE", f"{ITEMS}/{{item_id}}", delete_item, "Delete an item of a conversation."),
    ]


def _entry(
    method: str,
    path: str,
    endpoint: Any,
    summary: str,
    body: type[msgspec.Struct] | None = None,
    example: dict[str, Any] | None = None,
) -> Entry:
    docs = Docs("OpenAI", summary, () if body is None else (body,), example)
    return Entry(path, endpoint, access="user", methods=[method], is_limited=body is not None, docs=docs)


def _read(payload: dict[str, Any], kind: type[Body]) -> Body:
    """Checks a JSON body's form. Raises InvalidRequest."""
    fields = offered(payload, kind.__struct_fields__, TABLE)
    if isinstance(fields.get("items"), list) and len(fields["items"]) <= MAX_ITEMS:
        fields["items"] = read_items(fields["items"], "items")
    return convert(fields, kind, table=TABLE)


def _own(items: Items) -> list[dict[str, Any]]:
    """Returns items as a conversation keeps them. Raises InvalidRequest for one that only names another."""
    for index, item in enumerate(items):
        if isinstance(item, ResponsesReference):
            raise InvalidRequest(
                f"items[{index}].type item_reference: a conversation keeps items, not references; send the item",
                field=f"items[{index}].type",
            )
    return kept_items(items)


def _named(request: Request) -> tuple[str, str]:
    """Returns the client, and the id of the conversation in the path."""
    return client_name(request), request.path_params["conversation_id"]


def _store(state: ServerState) -> ConversationStore:
    if state.recordings.responses is None:
        raise NotFound(NOTHING_KEPT, field="conversation_id", code="conversation_not_found")
    return state.recordings.responses.conversations


def _answer(content: Any) -> Response:
    return Response(_encode(content), media_type="application/json")
