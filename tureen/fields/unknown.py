"""Decides whether a field that a declared type does not have is reported as ignored, or refused with its name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from msgspec import inspect

from tureen.errors import InvalidRequest, echo, excerpt
from tureen.fields import ignored
from tureen.fields.enum_hints import members, type_info
from tureen.fields.known_options import acting_fields, folded, is_off, known_options, names_elsewhere, same_here
from tureen.fields.rules import FieldTable, beside_reason

NEAR = 0.8
"""Minimum similarity of two names (difflib) at which one counts as a typing error of the other."""

UNSURE = 0.6
"""The same for a name that no API has, which is refused anyway."""

MAX_UNKNOWN = 64
"""Maximum number of unknown names in a body, because comparing each with the known ones takes time."""

OBJECTS = inspect.StructType, inspect.ListType, inspect.VarTupleType
NULLABLE = inspect.NoneType, inspect.AnyType


def refuse(name: str, known: Collection[str], where: str = "", way_out: str = "") -> NoReturn:
    """Raises InvalidRequest for an unknown field, with advice or the closest known name. `where`: what the error calls
    the object that has it; "" = the body itself."""
    is_elsewhere = folded(name) in names_elsewhere()
    cutoff = NEAR if is_elsewhere else UNSURE
    hints = [] if way_out else difflib.get_close_matches(name[:64], known, n=1, cutoff=cutoff)
    hint = _did_you_mean(hints[0]) if hints else way_out
    if not hint and is_elsewhere:
        hint = "; other APIs have this field, this one does not: leave it out"
    place = f" in {where}" if where else ""
    raise InvalidRequest(
        f"unknown field {echo(name)}{place}{hint}",
        field=f"{where}.{excerpt(name)}" if where else excerpt(name),
        code="unknown_parameter",
    )


def _did_you_mean(name: str) -> str:
    return f"; did you mean '{name}'?"


def _way_out(name: str, known: Collection[str], inside: Collection[str], at: str) -> str:
    """Returns advice about a field that changes answers elsewhere: this API's name for it, the object `at` with the
    fields `inside`, or the routes that have it."""
    own = name if name in inside else same_here(name, inside)
    if own is not None:
        return f'; it belongs in {at}: send "{at}": {{"{own}": …}}'
    close = difflib.get_close_matches(name[:64], known, n=1, cutoff=NEAR)
    hint = same_here(name, known) or next(iter(close), None)
    if hint is not None:
        return _did_you_mean(hint)
    routes = " and ".join(acting_fields()[folded(name)].routes[:2])
    there = f"{routes}: send the request there, or leave it out" if routes else "other servers: leave it out"
    return f"; it changes answers of {there}"


def settle(
    name: str,
    value: Any,
    known: Collection[str],
    table: FieldTable,
    where: str = "",
    *,
    inside: Collection[str] = (),
    at: str = "",
) -> None:
    """Decides about a field of a body, or of its sampling parameters, that the API does not have. A value that switches
    the option off counts as not sent. A field that changes the answer in another API raises InvalidRequest, and so does
    a typing error of a known name. Other fields are reported as ignored or refused (`settle_inner`).

    `inside`: the fields of the object `at` in the body, which holds sampling parameters.
    """
    options = known_options()
    path = f"{where}.{name}" if where else name
    if name in options.beside:
        ignored.tell(path, beside_reason(options.beside[name]))
    elif is_off(name, value):
        return
    elif name in options.absent:
        raise InvalidRequest(f"{path} is not available: {options.absent[name].why}", field=path, code="not_available")
    elif folded(name) in acting_fields():
        refuse(name, known, where, _way_out(name, known, inside, at))
    else:
        settle_inner(name, known, table, where)


def settle_inner(name: str, known: Collection[str], table: FieldTable, where: str = "") -> None:
    """Reports an unknown field as ignored, or raises InvalidRequest, by the server's settings or else the table.
    Refuses a name close to a known one."""
    current = ignored.current.get()
    policy = current.unknown_fields if current is not None and current.unknown_fields else None
    is_told = table.tells_unknown if policy is None else policy == "tell"
    if not is_told or _is_near(name[:64], tuple(known)):
        refuse(name, known, where)
    if current is not None:
        current.unknown_names.add(name)
        if len(current.unknown_names) > MAX_UNKNOWN:
            raise InvalidRequest(f"more than {MAX_UNKNOWN} unknown fields, the last of them {echo(name)}")
    shown = excerpt(name)
    path = f"{where}.{shown}" if where else shown
    ignored.tell(path, "this API has no such field; leave it out", is_declared=False)


@lru_cache(256)
def _is_near(name: str, known: tuple[str, ...]) -> bool:
    names = {folded(other) for other in known}
    return bool(difflib.get_close_matches(folded(name), names, n=1, cutoff=NEAR))


def cleaned(value: Any, kind: Any, table: FieldTable, path: Callable[[str], str] = str) -> Any:
    """Returns a copy of `value` without the fields that the declared type `kind` does not have, at any depth, and
    without nulls that it does not allow. Reports or refuses each of these fields. `path` returns what an error calls a
    field of `value`. Raises InvalidRequest."""
    return _cleaned(value, list(members(type_info(kind))), table, path("").rstrip("."))


def _cleaned(value: Any, types: Sequence[inspect.Type], table: FieldTable, path: str) -> Any:
    if isinstance(value, list):
        lists = [kind for kind in types if isinstance(kind, inspect.ListType | inspect.VarTupleType)]
        entries = [entry for kind in lists for entry in members(kind.item_type) if isinstance(entry, OBJECTS)]
        if not entries:
            return value
        return [_cleaned(entry, entries, table, f"{path}[{index}]") for index, entry in enumerate(value)]
    struct = _struct_of(value, types) if isinstance(value, dict) else None
    return value if struct is None else _cleaned_object(value, struct, table, path)


def _cleaned_object(value: dict[str, Any], struct: inspect.StructType, table: FieldTable, path: str) -> dict[str, Any]:
    declared = {field.encode_name: list(members(field.type)) for field in struct.fields}
    kept: dict[str, Any] = {}
    for name, inner in value.items():
        here = f"{path}.{name}" if path else name
        types = declared.get(name)
        if inner is None and types is not None and not any(isinstance(kind, NULLABLE) for kind in types):
            continue
        if types is not None:
            kept[name] = _cleaned(inner, types, table, here)
        elif name == struct.tag_field:
            kept[name] = inner
        elif inner is not None and not _is_settled(name, inner, table, here):
            settle_inner(name, tuple(declared), table, path)
    return kept


def _is_settled(name: str, value: Any, table: FieldTable, path: str) -> bool:
    """Applies the table's verdict on the field. Returns whether it has one. Raises InvalidRequest."""
    for key in (ignored.label_of(path), f"*.{name}"):
        if key in table.refused or key in table.told:
            table.settle(key, value, path)
            return True
    return False


def _struct_of(value: dict[str, Any], types: Sequence[inspect.Type]) -> inspect.StructType | None:
    """Returns the declared type of an object: the one with its tag, if there are several."""
    structs = [kind for kind in types if isinstance(kind, inspect.StructType)]
    tagged = [kind for kind in structs if kind.tag_field is not None and value.get(kind.tag_field) == kind.tag]
    untagged = [kind for kind in structs if kind.tag_field is None]
    return next(iter(tagged or untagged), None)
