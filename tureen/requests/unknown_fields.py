"""Decides what becomes of a field that a declared type does not have: told, or refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, NoReturn

from msgspec import inspect

from tureen.errors import InvalidRequest, echo
from tureen.requests import telling
from tureen.requests.allowed import members, type_info
from tureen.requests.verdicts import FieldTable

NEAR = 0.8
"""Similarity of two names, by difflib, from which one is taken for a slip of the other."""

MAX_UNKNOWN = 64
"""Most names in a body that nobody knows: finding out what each resembles takes time."""

SAMPLING_ELSEWHERE = frozenset((
    "maxlength", "maxnewtoken", "maxoutputtokens", "maxtokenstosample", "maxcompletiontokens", "maxgenlen",
    "numpredict", "npredict", "minlength", "temp", "topa", "topnsigma", "typicalp", "typical", "tfs", "tfsz",
    "mirostat", "mirostatmode", "dynatemprange", "drymultiplier", "xtcprobability", "smoothingfactor",
    "repeatpenalty", "repetitioncontext", "norepeatngramsize", "lengthpenalty", "numbeams", "usebeamsearch",
    "penaltyalpha", "guidancescale", "cfgscale", "negativeprompt", "dosample", "stopwords", "stopsequence",
    "stopsequences", "stopstrings", "badwords", "badwordsids", "suppresstokens", "responseschema",
    "responsemimetype", "jsonmode", "grammarstring", "enablethinking", "thinkingbudget", "systemprompt", "suffix",
    "randomseed", "seedvalue",
))  # fmt: skip
"""Names that change the answer in other servers' APIs, in small letters and without underscores. In an API that does
not have them they are refused, however tolerant it is: another answer would come than was asked for."""


def refuse(name: str, known: Collection[str], where: str = "") -> NoReturn:
    """Raises InvalidRequest for an unknown field, with the closest known name. `where`: what the error calls the object
    that has it; "" = the body itself."""
    hints = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"; did you mean '{hints[0]}'?" if hints else ""
    place = f" in {where}" if where else ""
    raise InvalidRequest(
        f"unknown field {echo(name)}{place}{hint}",
        field=f"{where}.{echo(name)[1:-1]}" if where else echo(name)[1:-1],
        code="unknown_parameter",
    )


def settle(name: str, known: Collection[str], table: FieldTable, where: str = "", *, is_body: bool = True) -> None:
    """Tells an unknown field, or raises InvalidRequest for it: as the server's settings say, else as the table does.

    A name close to a known one is taken for a slip, and refused. `is_body`: sampling parameters may stand beside it.
    """
    current = telling.current.get()
    policy = current.unknown_fields if current is not None and current.unknown_fields else None
    is_told = table.tells_unknown if policy is None else policy == "tell"
    if not is_told or _is_near(name[:64], tuple(known)) or (is_body and _folded(name) in SAMPLING_ELSEWHERE):
        refuse(name, known, where)
    if current is not None:
        current.unknown_names.add(name)
        if len(current.unknown_names) > MAX_UNKNOWN:
            raise InvalidRequest(f"more than {MAX_UNKNOWN} unknown fields, the last of them {echo(name)}")
    shown = echo(name)[1:-1]
    path = f"{where}.{shown}" if where else shown
    telling.tell(path, "this API has no such field; leave it out", is_declared=False)


@lru_cache(256)
def _is_near(name: str, known: tuple[str, ...]) -> bool:
    folded = {_folded(other) for other in known}
    return bool(difflib.get_close_matches(_folded(name), folded, n=1, cutoff=NEAR))


def _folded(name: str) -> str:
    return name[:64].lower().replace("_", "").replace("-", "")


def without_unknown(value: Any, kind: Any, table: FieldTable, path: Callable[[str], str] = str) -> Any:
    """Returns a copy of `value` without the fields that the declared type `kind` does not have, at any depth; each is
    told, or refused by name. `path` returns what an error calls a field of `value`. Raises InvalidRequest."""
    return _Cleaner(table).cleaned(value, list(members(type_info(kind))), path("").rstrip("."))


class _Cleaner:
    """Walks plain data beside the type that it is to be converted to."""

    def __init__(self, table: FieldTable) -> None:
        self._table = table

    def cleaned(self, value: Any, types: list[inspect.Type], path: str) -> Any:
        if isinstance(value, list):
            items = [
                item
                for kind in types
                if isinstance(kind, inspect.ListType | inspect.VarTupleType)
                for item in members(kind.item_type)
            ]
            if not items:
                return value
            return [self.cleaned(entry, items, f"{path}[{index}]") for index, entry in enumerate(value)]
        struct = _struct_of(value, types) if isinstance(value, dict) else None
        return value if struct is None else self._object(value, struct, path)

    def _object(self, value: dict[str, Any], struct: inspect.StructType, path: str) -> dict[str, Any]:
        known = {field.encode_name: field.type for field in struct.fields}
        kept: dict[str, Any] = {}
        for name, inner in value.items():
            here = f"{path}.{name}" if path else name
            if name in known:
                kept[name] = self.cleaned(inner, list(members(known[name])), here)
            elif name == struct.tag_field:
                kept[name] = inner
            elif inner is not None and not self._is_settled(name, inner, here):
                settle(name, known, self._table, path, is_body=False)
        return kept

    def _is_settled(self, name: str, value: Any, path: str) -> bool:
        """Returns whether the table has a verdict on the field, which is followed. Raises InvalidRequest."""
        for key in (telling.label_of(path), f"*.{name}"):
            if key in self._table.refused:
                self._table.check(key, value, path)
                return True
            if key in self._table.told:
                self._table.tell(key, value, path)
                return True
        return False


def _struct_of(value: dict[str, Any], types: list[inspect.Type]) -> inspect.StructType | None:
    """Returns the declared object that `value` is meant to be: of several the one with its tag."""
    structs = [kind for kind in types if isinstance(kind, inspect.StructType)]
    tagged = [kind for kind in structs if kind.tag_field is not None and value.get(kind.tag_field) == kind.tag]
    untagged = [kind for kind in structs if kind.tag_field is None]
    return next(iter(tagged or untagged), None)
