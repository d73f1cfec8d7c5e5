"""Translates the flags of other servers into those of this one, by the tables of `peers/`.

It is imported only where a command line has something that its own flags do not explain.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tureen.cli.peer_tables import FlagRow, Kind, Peer, Takes, Verdict

SAMPLING = "--preferred-sampling-params"
COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
SIZES = {"k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}


class OwnFlag(NamedTuple):
    """A flag of this server's: how many values follow it, and what is wrong with each of them."""

    takes: Takes
    fault_of: Callable[[str], str]  # "" = it accepts the value
    words: bool  # whether a value is one of a few


class Note(NamedTuple):
    """A flag of a peer's, and what became of it."""

    kind: Kind
    theirs: str  # as on the command line; "" for a default of the peer
    ours: tuple[str, ...]
    why: str


class Translation(NamedTuple):
    """A command line in this server's words. `faults`: a sentence for each flag that cannot be had."""

    arguments: list[str]
    notes: list[Note]
    faults: list[str]


class NotHere(Exception):
    """A flag cannot be translated; the message says why."""


class Given(NamedTuple):
    """A flag as it stands on a command line."""

    name: str
    text: str  # the name as it was typed
    inline: str | None  # what stands behind `=`
    key: str = ""  # of a JSON value: what stands behind the dot
    line: str = ""  # how it is written with its value, if it is no flag


def translate(
    arguments: Sequence[str], own: Mapping[str, OwnFlag], peers: Sequence[Peer], *, is_peers: bool = False
) -> Translation:
    """Returns the command line with every flag in this server's words.

    is_peers: the line is meant for the one server of `peers`, whose meaning of a flag goes before this server's.
    """
    return _Translator(own, peers, is_peers).run(list(arguments))


def translate_settings(settings: Sequence[Given], own: Mapping[str, OwnFlag], peer: Peer) -> Translation:
    """Returns settings that a peer writes elsewhere, such as variables, in this server's words. `inline` has values."""
    return _Translator(own, [peer], True).run_settings(settings)


class _Translator:
    """Walks a command line once."""

    def __init__(self, own: Mapping[str, OwnFlag], peers: Sequence[Peer], is_peers: bool) -> None:
        self._own, self._peers, self._is_peers = own, list(peers), is_peers
        self._out: list[str] = []
        self._notes: list[Note] = []
        self._faults: list[str] = []
        self._num_values = 0  # faults that are only values which a setting may not have
        self._sampling: dict[str, object] = {}
        self._origins: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._is_one = False  # the flags that are not ours are all of one server

    def run(self, arguments: list[str]) -> Translation:
        foreign = [flag.name for flag in map(self._read, filter(is_flag, arguments)) if flag.name not in self._own]
        knowing = [peer for peer in self._peers if all(peer.find(name) for name in foreign)]
        self._peers = knowing or self._peers
        self._is_one = bool(foreign) and len(knowing) == 1
        while arguments:
            token = arguments.pop(0)
            if not is_flag(token):
                self._out.append(token)
                continue
            self._try(self._read(token), arguments)
        return self._result()

    def run_settings(self, settings: Sequence[Given]) -> Translation:
        for setting in settings:
            self._try(setting, [])
        return self._result()

    def _try(self, flag: Given, arguments: list[str]) -> None:
        try:
            self._take(flag, arguments)
        except NotHere as refusal:
            self._faults.append(str(refusal))

    def _result(self) -> Translation:
        if self._sampling:
            self._out += [SAMPLING, json.dumps(self._sampling)]
        are_values = len(self._faults) == self._num_values  # settings.py names them, with those of file and environment
        return Translation(self._out, self._notes, [] if are_values else self._faults)

    def _read(self, token: str) -> Given:
        text, equals, inline = token.partition("=")
        name = text.replace("_", "-") if text.startswith("--") else text
        if re.fullmatch(r"-O\d", name):
            return Given("-O", text, name[2:])
        base, _, key = name.partition(".")
        known = name in self._own or any(peer.find(name) for peer in self._peers)
        is_dotted = not known and any(peer.find(base) for peer in self._peers)
        return Given(base if is_dotted else name, text, inline if equals else None, key if is_dotted else "")

    def _take(self, flag: Given, arguments: list[str]) -> None:
        """Takes a flag with its values from the line. Raises NotHere."""
        if flag.name in self._own and not (self._is_peers and self._peers[0].find(flag.name)):
            self._take_own(flag, arguments)
            return
        candidates = [(peer, verdict) for peer in self._peers if (verdict := peer.find(flag.name)) is not None]
        if not candidates:
            _values(flag, "maybe", arguments)  # what follows is its value, not a model
            raise NotHere(f"unknown argument {flag.text}{hint(flag.name, self._own)}")
        values = _values(flag, candidates[0][1].takes, arguments)
        is_short = not flag.name.startswith("--")
        notes: dict[object, tuple[Peer, Note]] = {}
        for peer, verdict in candidates:
            note = self._judge(flag, values, verdict)
            notes.setdefault((note.kind, note.ours, is_short and note.kind == "refused" and note.why), (peer, note))
        told = [(peer, note) for peer, note in notes.values() if note.kind == "told"]
        if len(notes) > 1 and (is_short or not told or any(note.ours for _, note in notes.values())):
            meanings = " and ".join(f"{_long(verdict, flag)} of {peer.title}" for peer, verdict in candidates)
            raise NotHere(f"{flag.text} is ambiguous: {meanings}; write which one")
        self._follow(flag, *(told or list(notes.values()))[0])

    def _take_own(self, flag: Given, arguments: list[str]) -> None:
        own = self._own[flag.name]
        values = _values(flag, own.takes, arguments)
        faults = [fault for value in values if (fault := own.fault_of(value))]
        if not faults:
            self._emit((flag.name, *values), flag.name)
            self._warn(flag, values)
            return
        for peer in self._peers:
            verdict = peer.find(flag.name)
            note = None if verdict is None else self._judge(flag, values, verdict)
            if note is not None and note.kind not in ("refused", "same"):
                self._follow(flag, peer, note)
                return
        self._faults.append(f"{flag.text} {' '.join(values)}: {faults[0]}")
        if not own.words:
            self._num_values += 1
            self._emit((flag.name, *values), flag.name)

    def _warn(self, flag: Given, values: list[str]) -> None:
        """Notes that a flag has this server's meaning where the other flags are of one that means something else."""
        verdict = self._peers[0].find(flag.name) if self._is_one and not self._is_peers else None
        if verdict is not None and verdict.kind in ("becomes", "refused"):
            theirs = " ".join([flag.text, *values])
            self._notes.append(
                Note("same", theirs, (flag.name, *values), f"not {self._peers[0].title}'s: {verdict.row.why}")
            )

    def _judge(self, flag: Given, values: list[str], verdict: Verdict) -> Note:
        """Returns what a table says of a flag with these values."""
        row = verdict.row
        if verdict.kind == "refused":
            return Note("refused", flag.text, (), row.why)
        typed = " ".join([flag.text, *values] if flag.inline is None else [f"{flag.text}={flag.inline}"])
        theirs = flag.line or typed
        if verdict.kind == "told" and row.only is None:
            return Note("told", theirs, (), row.why)
        try:
            kept = list(_kept(row, FORMS.get(row.form.split(" ")[0], _as_it_is)(flag, row, values)))
        except NotHere as refusal:
            return Note("refused", theirs, (), str(refusal))
        if verdict.kind == "told" or (values and not kept):
            return Note("told", theirs, (), row.why or "it is always so")
        template = row.to or (flag.name if not values else f"{flag.name} {{}}")
        ours = _filled(template, kept)
        kind = "becomes" if verdict.kind == "same" and ours != (flag.name, *values) else verdict.kind
        return Note(kind, theirs, ours, row.why)

    def _follow(self, flag: Given, peer: Peer, note: Note) -> None:
        """Does what a note says. Raises NotHere."""
        if note.kind == "refused":
            raise NotHere(f"{note.theirs} of {peer.title}: {note.why}")
        if note.ours[:1] == (SAMPLING,) and len(note.ours) == 3:
            name, value = note.ours[1:]
            self._sampling[name] = _number(value)
            note = note._replace(ours=(SAMPLING, json.dumps({name: _number(value)})))
        elif note.ours:
            self._emit(note.ours, flag.name)
        if note.kind != "same" or self._is_peers:
            self._notes.append(note)

    def _emit(self, ours: tuple[str, ...], source: str) -> None:
        """Adds flags of this server's. Raises NotHere where two flags of a peer's ask for different things."""
        name, values = ours[0], ours[1:]
        if name == SAMPLING and len(values) == 1:
            members = _number(values[0])
            if isinstance(members, dict):
                self._sampling.update(members)
            else:
                self._out += ours  # the start says what is wrong with it
            return
        before = self._origins.setdefault(name, (source, values))
        own = self._own.get(name)
        if before[0] != source and before[1] != values and (own is None or own.takes != "many"):
            raise NotHere(f"{before[0]} and {source} ask for different {name}: {before[1][0]} and {values[0]}")
        if before[0] == source or before[1] != values:
            self._out += ours


def is_flag(token: str) -> bool:
    """Says whether an argument names a flag: it begins with a dash and is no number."""
    return token.startswith("-") and not re.fullmatch(r"-|--|-\d+(\.\d+)?|-\.\d+", token)


def hint(name: str, own: Mapping[str, object]) -> str:
    """Returns `; did you mean --port?` with the nearest of the command's own flags, else nothing."""
    words = {flag.lstrip("-"): flag for flag in own if flag != name}  # dashes make no words alike
    near = difflib.get_close_matches(name.lstrip("-"), words, n=1)
    return f"; did you mean {words[near[0]]}?" if near else ""


def _values(flag: Given, takes: Takes, arguments: list[str]) -> list[str]:
    """Takes the values of a flag from the line. Raises NotHere where one is missing."""
    if flag.inline is not None:
        return [flag.inline]
    values: list[str] = []
    most = {"nothing": 0, "many": len(arguments)}.get(takes, 1)
    while len(values) < most and arguments and not is_flag(arguments[0]):
        values.append(arguments.pop(0))
    if not values and takes in ("one", "many"):
        raise NotHere(f"{flag.text} needs a value")
    return values


def _kept(row: FlagRow, values: Sequence[str]) -> Iterator[str]:
    """Yields the values in this server's words, without those that are left out. Raises NotHere."""
    for value in values:
        if value in row.values:
            mapped = row.values[value]
        elif "*" in row.values:
            mapped = row.values["*"]
        elif row.only is None or value in row.only:
            mapped = value
        else:
            raise NotHere(row.otherwise or f"it must be {', '.join([*row.only, *row.values])}")
        if mapped:
            yield mapped


def _filled(template: str, values: Sequence[str]) -> tuple[str, ...]:
    """Returns a row's flags with the values in place of {}."""
    if "{}" not in template:
        return (*template.split(), *values) if template.startswith(SAMPLING) else tuple(template.split())
    words = template.split()
    if words == ["{}"]:  # the values are flags
        return tuple(values[0].split(" ", 1))
    return tuple(part for word in words for part in (values if word == "{}" else [word]))


def _number(value: str) -> object:
    try:
        number: object = json.loads(value)
    except ValueError:
        return value
    return number


def _long(verdict: Verdict, flag: Given) -> str:
    """Returns the long name of a short flag: in a row it stands before the short ones."""
    before = verdict.names[: verdict.names.index(flag.name) + 1] if flag.name in verdict.names else ()
    return next((name for name in reversed(before) if name.startswith("--")), flag.text)


def _as_it_is(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    return values


def _count(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    """32k and 32K are 32000 and 32768."""
    matches = [COUNT.fullmatch(value) for value in values]
    return [
        value if match is None else str(int(float(match[1]) * SIZES[match[2]]))
        for value, match in zip(values, matches, strict=True)
    ]


def _first(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    return values[0].split(",")[:1]


def _host(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    return [f"{'--uds' if value.endswith('.sock') else '--host'} {value}" for value in values]


def _list(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    """Returns the parts of lists, which are written with commas or as JSON."""
    try:
        return [str(part) for value in values for part in (json.loads(value) if "[" in value else value.split(","))]
    except ValueError:
        raise NotHere("its value is not a JSON list") from None


def _single(_: Given, row: FlagRow, values: list[str]) -> list[str]:
    if len(values) > 1 or "," in values[0]:
        raise NotHere(row.why)
    return values


def _json_member(flag: Given, row: FlagRow, values: list[str]) -> list[str]:
    """Returns a member of a JSON object, or what stands behind a flag with a dot and its name."""
    member = row.form.split(" ")[1]
    if flag.key:
        return values if flag.key == member else []
    try:
        members = json.loads(values[0])
        return [str(members[member])] if member in members else []
    except (ValueError, TypeError):
        raise NotHere("its value is not a JSON object") from None


def _adapters(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    """Returns NAME=PATH of adapters, which may be written as JSON objects."""
    try:
        objects = [json.loads(value) if value.startswith("{") else value for value in values]
        return [each if isinstance(each, str) else f"{each['name']}={each['path']}" for each in objects]
    except (ValueError, KeyError):
        raise NotHere("an adapter is NAME=PATH") from None


def _classes(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    """Returns NAME=MODULE:CLASS of classes that are written with a dot or a colon."""
    pairs = [value.replace(":", ".").rpartition(".") for value in values]
    return [f"{name}={module}:{name}" for module, _, name in pairs]


def _gguf_repository(_: Given, __: FlagRow, values: list[str]) -> list[str]:
    return [value if ":" in value else f"{value}:Q4_K_M" for value in values]


FORMS: dict[str, Callable[[Given, FlagRow, list[str]], list[str]]] = {
    "count": _count,
    "first": _first,
    "host": _host,
    "list": _list,
    "one": _single,
    "json": _json_member,
    "adapters": _adapters,
    "classes": _classes,
    "gguf": _gguf_repository,
}
"""How values are written: the first word of a row's `form`."""


def told(notes: Sequence[Note]) -> list[str]:
    """Returns the lines that tell at the start what became of the flags of another server, at most one of a kind."""
    lines = []
    becomes = [f"{note.theirs} is {' '.join(note.ours)}{_because(note)}" for note in notes if note.kind == "becomes"]
    without = [f"{note.theirs}{_because(note)}" for note in notes if note.kind == "told"]
    own = [f"{note.theirs}{_because(note)}" for note in notes if note.kind == "same"]
    for title, texts in (("here", becomes), ("without effect here", without), ("with this server's meaning", own)):
        if texts:
            lines.append(f"{title}: {'; '.join(texts)}")
    return lines


def _because(note: Note) -> str:
    return f" ({note.why})" if note.why else ""
