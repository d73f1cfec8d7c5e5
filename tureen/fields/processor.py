"""Checks the form of the field `custom_logit_processor`, without unpickling anything."""

from __future__ import annotations

import re

from tureen.config import Config
from tureen.errors import InvalidRequest, PayloadTooLarge, echo
from tureen.fields.body import read_json
from tureen.logit_processor import BUILT_IN, PYTHON, SGLANG_MODULE, SGLANG_NAMES

MAX_PAYLOAD_CHARS = 1 << 20

_MODULE = re.escape(SGLANG_MODULE.encode())
_SHIPPED = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?"  # protocol, frame
    rb"(?:\x8c." + _MODULE + rb"\x94?\x8c.(?P<name>\w+)\x94?\x93\x94?|c" + _MODULE + rb"\n(?P<old_name>\w+)\n(?:q.)?)"
    rb"(?:\)\x81(?:\x94|q.)?)?\.",  # an object of the class, as SGLang 0.4.3 sent it; the end
    re.DOTALL,
)
"""Matches a pickle that consists of the name of a class in SGLang's module, or of an instance without state."""


def check_processor(value: str, config: Config, field: str) -> str:
    """Returns a processor's registered name, or a payload in the form of SGLang's CustomLogitProcessor.to_str().

    A payload that only names one of SGLang's processors, without code, becomes that name. Raises InvalidRequest for any
    other value, and for a payload on a server that runs no client code.
    """
    if not value.lstrip().startswith("{"):
        names = [*BUILT_IN, *(entry.partition("=")[0] for entry in config.logit_processor)]
        if value not in names:
            raise InvalidRequest(
                f"{field}: there is no processor {echo(value)}; the server has {', '.join(names)}",
                field=field,
                code="custom_logit_processor_unknown",
            )
        return value
    payload = _payload(value, field)
    shipped = _shipped_name(payload)
    if shipped is not None:
        return shipped
    if not config.enable_custom_logit_processor:
        raise InvalidRequest(
            f"{field}: this server does not run clients' code; send the name of a processor, or start the server with "
            "--enable-custom-logit-processor",
            field=field,
            code="custom_logit_processor_disabled",
        )
    return value.strip()


def _payload(value: str, field: str) -> bytes:
    """Returns the pickle of a payload, unread. Raises InvalidRequest for any other form."""
    if len(value) > MAX_PAYLOAD_CHARS:
        raise _malformed(field, f"has {len(value)} characters, at most {MAX_PAYLOAD_CHARS} are allowed")
    try:
        payload = read_json(None, value.encode())
    except (InvalidRequest, PayloadTooLarge, UnicodeEncodeError):
        raise _malformed(field, "is not a JSON object") from None
    code = payload.get("callable")
    if not {"callable"} <= set(payload) <= {"callable", "python"} or not isinstance(code, str):
        raise _malformed(field, 'must be {"callable": …}, as to_str() makes it')
    version = payload.get("python", PYTHON)
    if version != PYTHON:
        raise _malformed(
            field, f"is bytecode of Python {echo(version)}, but this server runs {PYTHON}; create it with {PYTHON}"
        )
    try:
        return bytes.fromhex(code)
    except ValueError:
        raise _malformed(field, '"callable" must be hexadecimal, as to_str() makes it') from None


def _shipped_name(pickled: bytes) -> str | None:
    """Returns the name of SGLang's processor in a pickle; None for any other pickle. Unpickles nothing."""
    match = _SHIPPED.fullmatch(pickled)
    name = (match["name"] or match["old_name"]).decode() if match else None
    return name if name in SGLANG_NAMES else None


def _malformed(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", field=field, code="invalid_custom_logit_processor")
