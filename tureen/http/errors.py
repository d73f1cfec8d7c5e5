"""The one place where an error becomes bytes."""

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
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = error.message[:MAX_MESSAGE_CHARS]
    return {"error": {"message": message, "type": kind, "param": error.field, "code": error.code}}


def error_response(error: TureenError) -> Response:
    return shaped(error, error_object(error))


def shaped(error: TureenError, told: dict[str, Any], status: int | None = None) -> Response:
    """An error told in some API's words, with the headers that all of them need."""
    headers = {}
    if isinstance(error, TryLater):
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    body = msgspec.json.encode(told)
    return Response(body, status_code=status or error.status, headers=headers, media_type="application/json")
