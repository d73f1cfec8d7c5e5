"""Reads the query of OpenAI's lists of items, and writes the list.

Source: https://platform.openai.com/docs/api-reference/responses/input-items
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from starlette.requests import Request

from tureen.errors import InvalidRequest, NotFound, echo
from tureen.fields.body import refuse_unknown

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
INCLUDE = ("include", "include[]")
"""Names by which clients send what is to be in the items: all that there is, is always there."""


def query_of(request: Request, known: Collection[str]) -> dict[str, str]:
    """Returns the query of a URL. Raises InvalidRequest for names that are not in `known`."""
    query = dict(request.query_params)
    refuse_unknown(query, known, "the query")
    return query


def number_in(query: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    """Returns a whole number of a query. Raises InvalidRequest."""
    value = query.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 16 and least <= int(value) <= most):
        raise InvalidRequest(f"{name} must be a whole number from {least} to {most}, got {echo(value)}", field=name)
    return int(value)


def page(items: Sequence[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Returns the part of the items, the oldest first, that a query asks for: `limit`, `order`, `after`. Raises
    InvalidRequest, NotFound."""
    query = query_of(request, ("limit", "order", "after", *INCLUDE))
    limit = number_in(query, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {echo(order)}", field="order")
    items = list(items) if order == "asc" else list(reversed(items))
    if "after" in query:
        places = [index for index, item in enumerate(items) if item["id"] == query["after"]]
        if not places:
            raise NotFound(f"after: there is no item {echo(query['after'])}", field="after", code="item_not_found")
        items = items[places[0] + 1 :]
    data = items[:limit]
    ends = {"first_id": data[0]["id"] if data else "", "last_id": data[-1]["id"] if data else ""}
    return {"object": "list", "data": data, **ends, "has_more": len(items) > limit}
