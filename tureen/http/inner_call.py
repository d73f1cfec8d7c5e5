"""Calls a route from inside the server, as a client would over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import Message

from tureen.clients.quotas import ClientWork, serving
from tureen.errors import InvalidRequest, RequestFailed, TureenError
from tureen.fields import ignored
from tureen.http.call import SCOPE_KEY, ClientCall, error_response_for
from tureen.http.dialect import Entry
from tureen.log import get_logger

log = get_logger("http")


class InnerAnswer(NamedTuple):
    """The answer to an inner call, as HTTP would have sent it."""

    status: int
    headers: dict[str, str]
    body: bytes


async def call_route(entry: Entry, body: bytes, call: ClientCall, work: ClientWork) -> InnerAnswer:
    """Returns a route's answer to a JSON body. Does not check access. `call`: the client, and the `work` to charge."""
    call.work, call.render_error = work, entry.render_error
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": entry.path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "path_params": {},
        SCOPE_KEY: call,
    }
    unread, sent = [body], list[Message]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # no client disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    token = ignored.current.set(call.telling)
    with serving(work):
        try:
            response = await entry.endpoint(Request(scope, receive))
        except TureenError as error:
            response = error_response_for(error, scope)
        except RecursionError:
            response = error_response_for(InvalidRequest("the body is nested too deeply", code="invalid_json"), scope)
        except Exception:  # only this request fails
            log.exception("%s failed", call.request_id)
            failure = RequestFailed("an internal error ended this request; the server runs on")
            response = error_response_for(failure, scope)
        finally:
            ignored.current.reset(token)
        await response(scope, receive, send)
    head = sent[0]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head["headers"]}
    return InnerAnswer(head["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))
