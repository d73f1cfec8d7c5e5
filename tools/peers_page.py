"""Writes the tables of flags in docs/migrate-from-*.md, from the tables that `tureen serve` goes by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tureen.cli.peer_tables import NAMES, Peer, Verdict, load_peer, rows

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- flags: written by tools/docs.py from tureen/cli/peers/{name}.toml -->", "<!-- end of flags -->"


def peers_pages() -> dict[str, str]:
    """Returns the migration pages with their tables written anew; the text around them stays as it is."""
    pages = {}
    for name in (*NAMES, "ollama"):
        page = (DOCS / f"migrate-from-{name}.md").read_text(encoding="utf-8")
        begin = BEGIN.format(name=name)
        before, _, rest = page.partition(begin)
        after = rest.partition(END)[2]
        pages[f"migrate-from-{name}.md"] = (
            before + "\n".join([begin, "", *_lines(load_peer(name), name in NAMES), "", END]) + after
        )
    return pages


def _lines(peer: Peer, is_for_serve: bool) -> Iterator[str]:
    """`is_for_serve`: `tureen serve` takes the flags, too."""
    written = peer.written
    verdicts = list(rows(written))
    if is_for_serve:
        yield f"Flags of {peer.title} {written.version}. `tureen migrate -- {written.command} …` translates a whole"
        yield "command, with a reason on each line. `tureen serve` accepts them, too: [the command"
        yield "line](command-line.md)."
    else:
        yield f"Variables, instructions and parameters of a Modelfile, and flags of {peer.title} {written.version}:"
    yield from _table(f"{written.command}", "here", ((v, _ours(v)) for v in verdicts if v.kind in ("same", "becomes")))
    yield from ("", "Accepted, without effect:")
    yield from _table("flag", "why", ((v, _told(v)) for v in verdicts if v.kind == "told"))
    yield from ("", "Refused, with the nearest alternative:")
    yield from _table("flag", "why", ((v, v.row.why) for v in verdicts if v.kind == "refused"))
    if written.left_out:
        yield from (
            "",
            f"Left out deliberately, {sum(len(names.split()) for names in written.left_out.values())} more:",
        )
        yield from ("", "| flags | why |", "|---|---|")
        for why, names in written.left_out.items():
            yield f"| {_code(names.split())} | {why} |"


def _table(theirs: str, ours: str, cells: Iterator[tuple[Verdict, str]]) -> Iterator[str]:
    yield from ("", f"| {theirs} | {ours} |", "|---|---|")
    for verdict, text in cells:
        value = f" {verdict.value}" if verdict.value else ""
        yield f"| {_code(verdict.names)}{value} | {text} |".replace("|  |", "| the same |")


def _ours(verdict: Verdict) -> str:
    """Returns what a flag is here, its words for values, and what differs."""
    row = verdict.row
    flags = row.to.replace("{}", "").split()
    parts = [f"`{' '.join(flags)}`"] if flags else []
    renamed = [f"`{value}` is `{ours}`" for value, ours in row.values.items() if ours]
    dropped = [f"`{value}`" for value, ours in row.values.items() if not ours and value != "*"]
    if dropped:
        renamed.append(f"{', '.join(dropped)} left out")
    texts = [row.why, "; ".join(renamed), *([f"others refused: {row.otherwise}"] if row.otherwise else [])]
    return "; ".join([*(parts or ["unchanged"]), *filter(None, texts)])


def _told(verdict: Verdict) -> str:
    row = verdict.row
    only = (
        "" if row.only is None else f" ({', '.join(f'`{value}`' for value in row.only)}; else refused: {row.otherwise})"
    )
    return f"{row.why}{only}"


def _code(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
