"""Checks the form of the field `custom_logit_processor`; nothing is unpickled here."""

from __future__ import annotations

from tureen.config import Config
from tureen.errors import InvalidRequest, PayloadTooLarge, echo
from tureen.logit_processor import BUILT_IN
from tureen.requests.body import read_json

MAX_PAYLOAD_CHARS = 1 << 20


def check_processor(value: str, config: Config, field: str) -> str:
    """Returns a processor's registered name, or a payload in the form of SGLang's CustomLogitProcessor.to_str().

    Raises InvalidRequest for any other value, and for a payload on a server that runs no code of clients.
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
    if not config.enable_custom_logit_processor:
        raise InvalidRequest(
            f"{field}: this server runs no code of clients; send the name of a processor, or start the server with "
            "--enable-custom-logit-processor",
            field=field,
            code="custom_logit_processor_disabled",
        )
    if len(value) > MAX_PAYLOAD_CHARS:
        raise _malformed(field, f"has {len(value)} characters, at most {MAX_PAYLOAD_CHARS} are taken")
    try:
        payload = read_json(None, value.encode())
    except (InvalidRequest, PayloadTooLarge, UnicodeEncodeError):
        raise _malformed(field, "is not a JSON object") from None
    code = payload.get("callable")
    if set(payload) != {"callable"} or not isinstance(code, str):
        raise _malformed(field, 'must be {"callable": …}, as to_str() makes it')
    try:
        bytes.fromhex(code)
    except ValueError:
        raise _malformed(field, '"callable" must be hexadecimal, as to_str() makes it') from None
    return value.strip()


def _malformed(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", field=field, code="invalid_custom_logit_processor")
