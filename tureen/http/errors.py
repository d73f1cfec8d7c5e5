"""Turns errors into answers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from tureen.errors import TryLater, TureenError

MAX_MESSAGE_CHARS = 2000
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}


def error_object(error: TureenError) -> dict[str, Any]:
    """Returns an error in OpenAI's JSON form, which is our own too."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = error.message[:MAX_MESSAGE_CHARS]
    return {"error": {"message": message, "type": kind, "param": error.field, "code": error.code}}


def error_response(error: TureenError) -> Response:
    """Returns an error as an answer in our own form."""
    return error_answer(error, error_object(error))


def error_answer(error: TureenError, content: dict[str, Any], status: int | None = None) -> Response:
    """Returns an error as an answer with `content` as its body, in the form of an API, with the headers of every error.

    `status`: None = the error's own.
    """
    headers = {}
    if isinstance(error, TryLater):
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    body = msgspec.json.encode(content)
    return Response(body, status_code=status or error.status, headers=headers, media_type="application/json")
