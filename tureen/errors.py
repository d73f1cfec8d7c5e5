"""The exception tree.

TureenError                      every error of ours; carries .status, .field, .code
 ├── InvalidRequest        400   a field is wrong: names it
 │    └── ContextExceeded  400   the prompt, or the prompt and its output, need more tokens than the context has
 ├── Unauthorized          401   no or wrong API key
 ├── Forbidden             403   not allowed here
 ├── NotFound              404   route, model, adapter, session
 ├── MethodNotAllowed      405
 ├── RequestTimeout        408   the body did not arrive in time
 ├── Conflict              409   in use
 ├── PayloadTooLarge       413   body over the limit
 ├── UnsupportedMediaType  415   not application/json
 ├── Unprocessable         422   an Idempotency-Key that belongs to another request
 ├── UpgradeRefused        426   a WebSocket: this server speaks HTTP
 ├── TooManyRequests       429   this client has enough running, or used enough; carries .retry_after_s
 ├── HeadersTooLarge       431   request line and headers over the limit
 ├── RequestFailed         500   this request failed; others go on
 ├── Unavailable           503   queue full, draining, engine dead; carries .retry_after_s
 ├── DeadlineExceeded      504
 └── StartupError           –    the server cannot start; one line that names the fix, exit status 1

Imports: nothing.
Imported by: all.
"""

from __future__ import annotations

import re

ECHO_LIMIT = 64
FIELD_NAME = re.compile(r"[A-Za-z_]\w{0,63}(?=(\[[^\]]*\])*$)")
"""The last name in a path."""


class TureenError(Exception):
    """An error a client or operator may see. `message` names the field, what was got, what is allowed, and the fix."""

    status = 500
    code = "internal_error"
    request_id = ""
    """Id of the HTTP request, for answers whose body has it; set when the answer is written."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        if code is not None:
            self.code = code


class InvalidRequest(TureenError):
    """A field of the request is wrong.

    The code names the field, unless a better one is given: `invalid_top_p` for `sampling_params[2].top_p`.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        if code is None and field is not None:
            name = FIELD_NAME.search(field)
            code = f"invalid_{name.group()}" if name else None
        super().__init__(message, field=field, code=code)


class ContextExceeded(InvalidRequest):
    """The prompt, or the prompt with the output that the request asks for, is longer than the context.

    `num_tokens`: how many it takes, at least. `capacity`: how many the context has.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, field: str | None, num_tokens: int, capacity: int) -> None:
        super().__init__(message, field=field, code=self.code)
        self.num_tokens, self.capacity = num_tokens, capacity


class Unauthorized(TureenError):
    status = 401
    code = "unauthorized"


class Forbidden(TureenError):
    status = 403
    code = "forbidden"


class NotFound(TureenError):
    status = 404
    code = "not_found"


class MethodNotAllowed(TureenError):
    """The path has no such method. `allowed` becomes the header `Allow`."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestTimeout(TureenError):
    status = 408
    code = "request_timeout"


class Conflict(TureenError):
    status = 409
    code = "conflict"


class PayloadTooLarge(TureenError):
    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(TureenError):
    status = 415
    code = "unsupported_media_type"


class Unprocessable(TureenError):
    status = 422
    code = "unprocessable"


class UpgradeRefused(TureenError):
    """The status by which a client knows to go on over HTTP."""

    status = 426
    code = "no_websockets"


class HeadersTooLarge(TureenError):
    status = 431
    code = "headers_too_large"


class RequestFailed(TureenError):
    status = 500
    code = "request_failed"


class TryLater(TureenError):
    """The request is refused for now. `retry_after_s` becomes the header `Retry-After`."""

    def __init__(
        self, message: str, *, field: str | None = None, code: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.retry_after_s = retry_after_s


class TooManyRequests(TryLater):
    status = 429
    code = "too_many_requests"


class Unavailable(TryLater):
    status = 503
    code = "unavailable"


class DeadlineExceeded(TureenError):
    status = 504
    code = "deadline_exceeded"


class StartupError(TureenError):
    code = "startup_error"


def not_loaded(adapter: str, field: str) -> NotFound:
    """Returns the error for a request that names an adapter that is not loaded; `field`: where it names it."""
    return NotFound(
        f"{field} {echo(adapter)} has never been loaded, or was unloaded; /v1/models lists the adapters",
        field=field,
        code="lora_not_found",
    )


def echo(value: object) -> str:
    """Returns a value for a message: at most 64 characters, printable, on one line."""
    if isinstance(value, str):
        return f"'{excerpt(value[:ECHO_LIMIT])}'" + ("…" if len(value) > ECHO_LIMIT else "")
    return excerpt(_short_repr(value))


def excerpt(text: str) -> str:
    """Returns a text for a message without quotes: at most 64 characters, printable, on one line."""
    shown = "".join(ch if ch.isprintable() else "?" for ch in text[:ECHO_LIMIT])
    return shown + "…" if len(text) > ECHO_LIMIT else shown


def _short_repr(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 4 * ECHO_LIMIT:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else type(value).__name__
