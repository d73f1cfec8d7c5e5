"""`tureen migrate`: a command of another server in this one's words, with a reason a line."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tureen.cli.flags import CommandParser, subparsers
from tureen.cli.peer_tables import Peer, load_peer, load_peers
from tureen.cli.translation import Note, OwnFlag, Translation, translate
from tureen.errors import InvalidRequest, echo
from tureen.files import read_text

if TYPE_CHECKING:
    from tureen.cli.ollama import Migrated

HELP = "translate a command of another server"
ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
CONTAINERS = ("docker", "podman", "nerdctl")


class PeerCommand(NamedTuple):
    """A command of another server. `port`: the one that a container publishes."""

    peer: Peer
    arguments: list[str]
    variables: list[str]
    port: str = ""
    is_container: bool = False


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the one flag, and the command."""
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="vllm serve …, ollama create …")


def run(options: argparse.Namespace) -> int:
    """Prints the translation. Returns 1 where something cannot be had. Raises InvalidRequest."""
    words = options.line[1:] if options.line[:1] == ["--"] else options.line
    if len(words) == 1:
        words = _split(words[0])
    command = read_command(words, [*load_peers(), load_peer("ollama")])
    migrated = _of_ollama(command) if command.peer.title == "Ollama" else None
    result = migrate(command) if migrated is None else migrated.result
    variables = [each for each in command.variables if migrated is None or not each.startswith("OLLAMA_")]
    ours = ["tureen", *(["serve"] if migrated is None else migrated.words), *result.arguments]
    for name, text in ({} if migrated is None else migrated.templates).items():
        _write(Path(name), text)
    if options.json:
        notes = [dict(zip(("verdict", "theirs", "ours", "why"), note, strict=True)) for note in result.notes]
        print(msgspec.json.encode({"command": [*variables, *ours], "notes": notes, "not_here": result.faults}).decode())
    else:
        print("\n".join(map(_on_one_line, _reasons(command.peer, result))))
        print(" ".join([*map(_assignment, variables), shlex.join(ours)]))
    return 1 if result.faults else 0


def _split(line: str) -> list[str]:
    """Returns the words of a command that is one argument. Raises InvalidRequest."""
    try:
        return shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise InvalidRequest(f"{echo(line)} is not a command of a shell: {error}") from None


def _on_one_line(reason: str) -> str:
    """Returns a comment whose values cannot end it: what follows a line break would be a command of its own."""
    return "".join(ch if ch.isprintable() else " " for ch in reason)


def _assignment(variable: str) -> str:
    """Returns NAME=VALUE for a shell, which takes it for a command if the name is quoted, too."""
    name, _, value = variable.partition("=")
    return f"{name}={shlex.quote(value) if value else ''}"


def migrate(command: PeerCommand) -> Translation:
    """Returns a command of another server in this one's words."""
    result = _outside(translate(command.arguments, _own_flags(), [command.peer], is_peers=True), command)
    arguments, notes = list(result.arguments), list(result.notes)
    if "--uds" not in arguments:
        for name, default in command.peer.written.defaults.items():
            if name not in arguments:
                arguments += [name, default.value]
                notes.append(Note("becomes", "", (name, default.value), default.why))
    return Translation(arguments, notes, result.faults)


def _of_ollama(command: PeerCommand) -> Migrated:
    """Returns a command of Ollama in this program's words. Raises InvalidRequest, StartupError."""
    ollama = importlib.import_module("tureen.cli.ollama")
    config = importlib.import_module("tureen.config_sources").load({})
    inside = ["OLLAMA_HOST=0.0.0.0"] if command.is_container else []  # as the image has it
    variables = [*inside, *command.variables]
    migrated: Migrated = ollama.migrate_ollama(command.arguments, variables, _own_flags(), command.peer, config)
    return migrated._replace(result=_outside(migrated.result, command))


def _own_flags() -> Mapping[str, OwnFlag]:
    parser = importlib.import_module("tureen.cli.command_line").parser(["serve"])
    serve = subparsers(parser)[1]
    assert isinstance(serve, CommandParser)
    return serve.own_flags()


def _outside(result: Translation, command: PeerCommand) -> Translation:
    """Returns a translation with what a container's options say."""
    arguments, notes = list(result.arguments), list(result.notes)
    if command.is_container:
        why = "its variables are kept, its other options are dropped: give paths as on the host"
        notes.append(Note("told", "the container", (), why))
    if command.port:
        arguments = [*_without(arguments, "--port"), "--port", command.port]
        notes.append(
            Note("becomes", f"-p {command.port}", ("--port", command.port), "the container's port on the host")
        )
    return Translation(arguments, notes, result.faults)


def _write(path: Path, text: str) -> None:
    """Writes a chat template, unless it is there. Raises InvalidRequest where another file is in its place."""
    try:
        if not path.exists():
            path.write_text(text, encoding="utf-8")
        elif read_text(path) != text:
            raise InvalidRequest(f"{path}: exists and differs from the chat template to write; move it away")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: the chat template cannot be written: {error}") from None


def read_command(words: list[str], peers: list[Peer]) -> PeerCommand:
    """Finds the server that a command starts. Raises InvalidRequest."""
    variables = []
    while words and ASSIGNMENT.fullmatch(words[0]):
        variables.append(words[0])
        words = words[1:]
    if words and PurePath(words[0]).name in CONTAINERS:
        for place, word in enumerate(words):
            named = [peer for peer in peers if any(image in word for image in peer.written.images)]
            if named and not word.startswith("-"):
                inside, outside = words[place + 1 :], words[:place]
                rest = _behind_program(inside, named[0])
                variables += _variables(outside)
                return PeerCommand(named[0], inside if rest is None else rest, variables, _published(outside), True)
    for peer in peers:
        rest = _behind_program(words[:8], peer)
        if rest is not None:
            return PeerCommand(peer, rest + words[8:], variables)
    known = ", ".join(peer.written.command for peer in peers)
    received = f", not {shlex.join(words[:3])!r}" if words else ""
    raise InvalidRequest(
        f"give the command of a server that tureen knows after --, as in tureen migrate -- vllm serve MODEL{received}; "
        f"it knows: {known}"
    )


def _behind_program(words: list[str], peer: Peer) -> list[str] | None:
    """Returns what follows the program in a command; None = the command is of another program."""
    for program in peer.written.programs:
        parts = program.split()
        for place in range(len(words)):
            if [PurePath(words[place]).name, *words[place + 1 : place + len(parts)]] == parts:
                return words[place + len(parts) :]
    return None


def _published(words: list[str]) -> str:
    """Returns the port that a container has outside."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        value = following if word in ("-p", "--publish") else word.removeprefix("--publish=").removeprefix("-p")
        if (match := re.fullmatch(r"(?:[\d.]+:)?(\d+):\d+", value)) is not None:
            return match[1]
    return ""


def _variables(words: list[str]) -> list[str]:
    """Returns the variables that a container is given."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    values = [
        following if word in ("-e", "--env") else word.removeprefix("--env=")
        for word, following in pairs
        if word.startswith(("-e", "--env"))
    ]
    return [value for value in values if ASSIGNMENT.fullmatch(value)]


def _without(arguments: list[str], name: str) -> list[str]:
    place = arguments.index(name) if name in arguments else len(arguments)
    return arguments[:place] + arguments[place + 2 :]


def _reasons(peer: Peer, result: Translation) -> Iterator[str]:
    """Yields a comment for each flag."""
    yield f"# {peer.title} {peer.written.version}: {peer.written.command}"
    same = [note.theirs for note in result.notes if note.kind == "same" and not note.why]
    if same:
        yield f"# unchanged: {', '.join(same)}"
    for note in result.notes:
        why = f": {note.why}" if note.why else ""
        if not note.theirs:
            yield f"# {shlex.join(note.ours)} is added{why}"
        elif note.kind == "becomes":
            yield f"# {note.theirs} is {shlex.join(note.ours)}{why}"
        elif note.kind == "told":
            yield f"# {note.theirs} is left out{why}"
        elif note.why:
            yield f"# {note.theirs} is unchanged{why}"
    for fault in result.faults:
        yield f"# NOT SUPPORTED: {fault}"
