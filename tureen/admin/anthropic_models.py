"""Writes the list of models in the form of Anthropic's API, for its clients, which send `anthropic-version`.

Source: https://docs.anthropic.com/en/api/models-list
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from tureen.errors import InvalidRequest, echo

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000

Card = dict[str, Any]
"""A model's entry in `/v1/models`."""


def is_from_anthropic_client(request: Request) -> bool:
    """Return whether a client of Anthropic's API sent the request."""
    return "anthropic-version" in request.headers


def anthropic_card(card: Card) -> Card:
    """Return a model's entry in Anthropic's form. `card`: its entry in OpenAI's form."""
    created = datetime.fromtimestamp(card["created"], UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def anthropic_page(cards: Sequence[Card], request: Request) -> dict[str, Any]:
    """Return the part of the list that the query asks for by `limit`, and `after_id` or `before_id`.

    Raises InvalidRequest for a limit out of range and for an id that is not in the list.
    """
    limit = _limit(request)
    first, last = 0, len(cards)
    after, before = _place(cards, request, "after_id"), _place(cards, request, "before_id")
    if after is not None:
        first = after + 1
    if before is not None:
        last = before
    is_backwards = before is not None and after is None
    shown = range(max(first, last - limit), last) if is_backwards else range(first, min(last, first + limit))
    data = [anthropic_card(cards[index]) for index in shown]
    return {
        "data": data,
        "has_more": len(shown) < last - first,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _limit(request: Request) -> int:
    value = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not (value.isascii() and value.isdigit() and len(value) < 5 and 1 <= int(value) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_LIMIT}, got {echo(value)}", field="limit")
    return int(value)


def _place(cards: Sequence[Card], request: Request, field: str) -> int | None:
    """Return the index of the model that a field of the query names; None without the field."""
    name = request.query_params.get(field)
    if not name:
        return None
    names = [card["id"] for card in cards]
    if name not in names:
        raise InvalidRequest(f"{field} {echo(name)} is not in the list; leave it out to list all models", field=field)
    return names.index(name)
