"""Reads the tables of `peers/`: what becomes of the flags of other servers.

A table is the source of the command line's verdicts, of `tureen migrate`, and of the migration pages in docs/. How it
is written: `peers/sglang.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

Kind = Literal["same", "becomes", "told", "refused"]
Takes = Literal["nothing", "one", "many", "maybe"]
"""How many values follow a flag; "maybe": one, or none."""

FOLDER = Path(__file__).parent / "peers"
NAMES = ("sglang", "vllm", "llamacpp", "tgi")


class FlagRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a table. `only`: the values that the row is about, None = all; `otherwise`: why others are refused."""

    to: str = ""  # the flags here, {} for the value; "" = the flag's own name
    why: str = ""
    only: list[str] | None = None
    values: dict[str, str] = {}  # a value of the peer's -> ours, "" = left out; "*" = any other
    otherwise: str = ""
    form: str = ""  # how the value is written: a function of translation.py


class Default(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that a peer has where its flag is not given, and this server has not."""

    value: str
    why: str


class PeerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table as it is written in its file. A key of a section is a usage line, of `left_out` the reason for several
    flags."""

    title: str
    command: str
    version: str
    programs: list[str]
    images: list[str]
    positional: str = ""
    defaults: dict[str, Default] = {}
    same: dict[str, str | FlagRow] = {}
    becomes: dict[str, str | FlagRow] = {}
    told: dict[str, str | FlagRow] = {}
    refused: dict[str, str | FlagRow] = {}
    left_out: dict[str, str] = {}


class Verdict(NamedTuple):
    """A row of a table: what becomes of the flag that has all these `names`."""

    names: tuple[str, ...]
    takes: Takes
    value: str  # the word for its value in a usage line
    kind: Kind
    row: FlagRow

    @property
    def usage(self) -> str:
        return " ".join([", ".join(self.names), *([self.value] if self.value else [])])


class Peer(NamedTuple):
    """Another server: what its table says. `verdicts`: by each name of a flag."""

    written: PeerTable
    verdicts: dict[str, Verdict]

    @property
    def title(self) -> str:
        return self.written.title

    def find(self, name: str) -> Verdict | None:
        """Returns the verdict on a flag; on the opposite of a switch, the switch's own, told."""
        if name in self.verdicts:
            return self.verdicts[name]
        for negation, plain in (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-")):
            positive = self.verdicts.get(plain + name.removeprefix(negation)) if name.startswith(negation) else None
            if positive is not None and positive.takes in ("nothing", "maybe"):
                why = positive.row.why if positive.kind == "told" else "it is always so"
                return Verdict((name,), "nothing", "", "told", FlagRow(why=why))
        return None


def load_peers() -> list[Peer]:
    """Reads all tables."""
    return [load_peer(name) for name in NAMES]


def load_peer(name: str) -> Peer:
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    written = msgspec.convert(tomllib.loads(text), PeerTable)
    return Peer(written, {name: verdict for verdict in _verdicts(written) for name in verdict.names})


def rows(written: PeerTable) -> Iterator[Verdict]:
    """Yields the rows of the four sections in their order."""
    sections: tuple[tuple[Kind, dict[str, str | FlagRow]], ...] = (
        ("same", written.same),
        ("becomes", written.becomes),
        ("told", written.told),
        ("refused", written.refused),
    )
    for kind, section in sections:
        for usage, row in section.items():
            words = usage.split()
            *names, value = words if _has_value(words) else [*words, ""]
            if isinstance(row, str):
                row = FlagRow(to=row) if kind == "becomes" else FlagRow(why=row)
            yield Verdict(tuple(names), _takes(value), value, kind, row)


def _has_value(words: list[str]) -> bool:
    """Says whether a usage line ends with the word for a value. The names of a switch all begin with a dash."""
    return not words[-1].startswith("-")


def _takes(value: str) -> Takes:
    if not value:
        return "nothing"
    return "many" if value.endswith("...") else "maybe" if value.startswith("[") else "one"


def _verdicts(written: PeerTable) -> Iterator[Verdict]:
    yield from rows(written)
    for why, names in written.left_out.items():
        yield Verdict(tuple(names.split()), "maybe", "", "refused", FlagRow(why=why))
