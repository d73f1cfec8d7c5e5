"""`tureen config show`: every setting, and where its value comes from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec

from tureen.cli.flags import CommandParser, add_config, settings_of, tell_unknown_variables
from tureen.cli.places import in_columns
from tureen.config import ENV_PREFIX, fields
from tureen.config_sources import origins

HELP = "show every setting with the source of its value"
HIDDEN = "(hidden)"


class Shown(NamedTuple):
    """A setting as it is shown. `source`: where its value comes from."""

    name: str
    value: Any
    source: str


def add_flags(parser: CommandParser) -> None:
    """Adds `show` with a flag for each setting, as `tureen serve` has them."""
    actions = parser.add_subparsers(dest="action", metavar="show", required=True, parser_class=CommandParser)
    show = actions.add_parser("show", help=HELP, description=HELP)
    show.add_argument("model", nargs="?", metavar="MODEL", help="the model, as in --model-path")
    show.add_argument("--json", action="store_true", help="for programs")
    show.add_argument("--changed", action="store_true", help="leave out defaults")
    add_config(show, takes_lists=True)


def run(options: argparse.Namespace) -> int:
    """Prints the settings, and which variables are none. Raises StartupError."""
    tell_unknown_variables()
    defaults = {field.name: field.default for field in fields()}
    shown = [each for each in _settings(options) if each.value != defaults[each.name] or not options.changed]
    if options.json:
        print(msgspec.json.encode([each._asdict() for each in shown]).decode())
    else:
        print("\n".join(_lines(shown)) or "# every setting is at its default")
    return 0


def _settings(options: argparse.Namespace) -> Iterator[Shown]:
    """Yields the settings, secrets hidden. Raises StartupError."""
    named = origins(settings_of(options), file=options.config)
    for field in fields():
        value, source = named.get(field.name, (field.default, "default"))
        source = {"in the environment": f"{ENV_PREFIX}{field.name.upper()}", "on the command line": "a flag"}.get(
            source, source
        )
        is_secret = get_args(field.type)[1].extra["secret"]
        yield Shown(field.name, HIDDEN if is_secret and value is not None else value, source.removeprefix("in "))


def _lines(shown: list[Shown]) -> list[str]:
    """Returns a line a setting, as the TOML file of --config has them; those without a value are comments."""
    names = [each.name.replace("_", "-") for each in shown]
    return in_columns(
        [(_setting(name, each.value), f"# {each.source}") for name, each in zip(names, shown, strict=True)]
    )


def _setting(name: str, value: Any) -> str:
    """Returns a setting as a file has it; a comment where there is no value, or a secret one: as a value the word for
    it would become the secret."""
    if value is None or value == HIDDEN:
        return f"# {name}" + (f" {value}" if value else "")
    return f"{name} = {msgspec.json.encode(value).decode()}"
