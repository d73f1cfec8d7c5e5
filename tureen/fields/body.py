"""Reads JSON bodies into declared types. Errors name the field, the value received and the values allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from tureen.contract.params import ALIASES, EMPTY_IS_UNSET, SamplingParams
from tureen.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType, echo
from tureen.fields import unknown
from tureen.fields.enum_hints import words_at
from tureen.fields.rules import FieldTable

T = TypeVar("T")

PARAM_FIELDS = tuple(field.name for field in msgspec.structs.fields(SamplingParams))
JSON_TYPE, CHARSETS = "application/json", ("utf-8", "utf8", "us-ascii")
TEXT_LISTS = ("stop", "stop_regex")
NO_VERDICTS = FieldTable()
MAX_TOLD = 200
"""Maximum characters kept of msgspec's message, which may quote the client's input."""

MAX_PARTS = 1 << 19
"""Maximum number of keys, lists and objects in a body."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, also one that the end of the body cuts. Otherwise the search would begin again at every quote in it."""

UNKNOWN_FIELD, NULL = "Object contains unknown field", "got `null`"
NOT_ALLOWED = "Invalid enum value", "Invalid value"
"""Beginnings of msgspec's messages about an unknown field, and about a value outside an enum or a literal type; what
one about a null has."""

_AT = re.compile(r"^(?P<problem>.*?)(?: - at (?P<key>`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_TOO_LONG = re.compile(r"Expected `(?P<kind>array|object|str)` of length <= (?P<most>\d+)")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
ENTRY = "..."
"""The key of an entry of a map, as msgspec writes it."""


def read_json(content_type: str | None, body: bytes) -> dict[str, Any]:
    """Decodes a body as a JSON object. `content_type`: the header, None = not sent.

    Raises UnsupportedMediaType for a body that is not JSON, PayloadTooLarge, and InvalidRequest for a body that is not
    a valid JSON object.
    """
    _check_content_type(JSON_TYPE if content_type is None else content_type)
    _check_parts(body)
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        problem = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {problem[:MAX_TOLD]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {echo(value)}", code="invalid_json")
    return value


def _check_parts(body: bytes) -> None:
    """Raises PayloadTooLarge for a body with too many keys, lists and objects. Decoding millions of them blocks the
    process for many seconds."""
    if _num_parts(body) <= MAX_PARTS:
        return
    num_parts = _num_parts(_STRING.sub(b"", body))  # not those inside strings
    if num_parts > MAX_PARTS:
        raise PayloadTooLarge(
            f"the body has {num_parts} keys, lists and objects; at most {MAX_PARTS} are allowed; send several requests"
        )


def _num_parts(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{", b":")))


def _check_content_type(content_type: str) -> None:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if kind != JSON_TYPE:
        raise UnsupportedMediaType(
            f"the body must be JSON, got content type {echo(content_type)}; add the header 'Content-Type: {JSON_TYPE}'"
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in CHARSETS:
            raise InvalidRequest(
                f"the charset in the header Content-Type must be utf-8, as JSON is, got {echo(value)}",
                field="Content-Type",
                code="invalid_charset",
            )


def refuse_unknown(fields: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Raises InvalidRequest, with the closest known name, for the first of `fields` that is neither in `known` nor
    null.

    `where`: what the error calls the object that has the fields; "" = the body itself.
    """
    for name, value in fields.items():
        if name not in known and value is not None:
            unknown.refuse(name, known, where)


def offered(
    fields: Mapping[str, Any], known: Collection[str], table: FieldTable, where: str = "", **elsewhere: Any
) -> dict[str, Any]:
    """Returns the fields of an object that are to be converted: those of `known` that are not null.

    Reports fields as ignored (ignored.py) if `table` says that they have no effect, and unknown fields if the table or
    the server accepts them. `where`: what errors call the object; "" = the body itself. `elsewhere`: `inside`, the
    fields of the object `at` in the body, which holds sampling parameters. Raises InvalidRequest for refused fields.
    """
    kept = {}
    for name, value in fields.items():
        if name in table.refused or name in table.told:
            table.settle(name, value, f"{where}.{name}" if where else name)
        elif value is None:
            continue
        elif name in known:
            kept[name] = value
        else:
            unknown.settle(name, value, (*known, *table.refused), table, where, **elsewhere)
    return kept


def convert(value: Any, kind: type[T], path: Callable[[str], str] = str, table: FieldTable = NO_VERDICTS) -> T:
    """Converts plain data to a declared type. Raises InvalidRequest naming the field, the value and the allowed values.

    `path` returns what an error calls a field of `value`. `table`: verdicts on fields inside it that its type does not
    have.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError) as error:
        message = str(error)
        if message.startswith(UNKNOWN_FIELD) or NULL in message:
            value = unknown.cleaned(value, kind, table, path)
        else:
            raise _as_invalid_request(message, value, kind, path) from None
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _as_invalid_request(str(error), value, kind, path) from None


def _as_invalid_request(message: str, converted: Any, kind: Any, path: Callable[[str], str]) -> InvalidRequest:
    match = _AT.match(message)
    problem, steps = (match["problem"], match["path"] or "") if match else (message, "")
    is_key = match is not None and match["key"] is not None
    value, names = converted, []
    place: list[str | int] = []
    for name, index in (*_STEP.findall(steps), *([("", ENTRY)] if is_key else ())):
        key = _key_at_fault(message, converted, place, value, kind) if index == ENTRY else name or int(index)
        names.append(name or (f"[{index}]" if isinstance(key, int) else f"[{echo(key).replace(']', '?')}]"))
        place.append(key)
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
    value = place[-1] if is_key else value
    missing = _MISSING.fullmatch(problem)
    if missing:
        names.append(missing["name"])
    field = ".".join([path(names[0]), *names[1:]]).replace(".[", "[") if names else path("").rstrip(".")
    if missing:
        return InvalidRequest(f"{field} is missing", field=field)
    if problem.startswith(NOT_ALLOWED):
        problem = "must be " + " or ".join(echo(word) for word in words_at(kind, names))
    too_long = _TOO_LONG.fullmatch(problem)
    if too_long and isinstance(value, list | dict | str):
        unit = "characters" if too_long["kind"] == "str" else "entries"
        return InvalidRequest(f"{field} takes at most {too_long['most']} {unit}, got {len(value)}", field=field)
    expected = problem[:MAX_TOLD].replace("`", "").replace("Expected ", "expected ").split(", got ")[0]
    expected += " as key" if is_key else ""
    return InvalidRequest(f"{field or 'the body'}: {expected}, got {echo(value)}", field=field or None)


def _key_at_fault(message: str, converted: Any, place: list[str | int], entries: Any, kind: Any) -> str:
    """Returns the key of the first entry of a map that msgspec refuses with this message, which does not name it.

    `place`: the way from what was converted to the map. Halves the map until one entry is left.
    """
    if not isinstance(entries, dict):
        return ENTRY
    keys = list(entries)
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        try:
            msgspec.convert(_replaced(converted, place, {key: entries[key] for key in half}), kind, str_keys=True)
            is_here = False
        except (msgspec.ValidationError, OverflowError) as error:
            is_here = str(error) == message
        keys = half if is_here else keys[len(half) :]
    return str(keys[0]) if keys else ENTRY


def _replaced(value: Any, place: list[str | int], entries: dict[str, Any]) -> Any:
    """Returns a copy of plain data with other entries in the map at this place."""
    if not place:
        return entries
    copied = value.copy()
    copied[place[0]] = _replaced(value[place[0]], place[1:], entries)
    return copied


def require_equal(name: str, value: object, other: str, other_value: object) -> None:
    """Raises InvalidRequest if two names of one field have different values."""
    if value != other_value or isinstance(value, bool) is not isinstance(other_value, bool):  # True == 1
        message = f"{name} is {echo(value)}, but {other}, the same field, is {echo(other_value)}; send one"
        raise InvalidRequest(message, field=name)


def read_params(
    params: Mapping[str, Any], where: str = "sampling_params", table: FieldTable = NO_VERDICTS
) -> dict[str, Any]:
    """Returns the sampling parameters that a client sent, by the names of SamplingParams. Resolves aliases and omits
    nulls. Applies the verdicts of `table`. Raises InvalidRequest for an unknown name; does not check values."""
    fields: dict[str, Any] = {}
    for name, value in params.items():
        if name in table.refused or name in table.told:
            table.settle(name, value, f"{where}.{name}")
            continue
        if name not in PARAM_FIELDS and name not in ALIASES:
            if value is not None:
                unknown.settle(name, value, (*PARAM_FIELDS, *ALIASES), table, where)
            continue
        target = ALIASES.get(name, name)
        if value is None and name != "max_new_tokens":
            continue  # null is the default; for max_new_tokens it means up to the context end
        if value == "" and target in EMPTY_IS_UNSET:
            continue
        sent = [value] if name in TEXT_LISTS and isinstance(value, str) else value
        require_equal(f"{where}.{name}", sent, f"{where}.{target}", fields.setdefault(target, sent))
    return fields
