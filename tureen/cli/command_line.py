"""The `tureen` command. Each file of `commands` is one subcommand, which says what it does and takes its own flags."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence

from tureen import __version__
from tureen.cli import commands
from tureen.cli.flags import CommandParser
from tureen.errors import TureenError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns the exit status; an error of ours is one line on stderr and status 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(arguments).parse_args(arguments)
    try:
        return int(options.run(options))
    except TureenError as error:
        print(f"tureen: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser(arguments: Sequence[str] = ()) -> CommandParser:
    """Returns the parser of the subcommand that the arguments begin with; of all, where they begin with none."""
    top = CommandParser(prog="tureen", description="An LLM serving runtime.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"tureen {__version__}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    for name in arguments[:1] if arguments[:1] and arguments[0] in names else names:
        command = importlib.import_module(f"{commands.__name__}.{name}")
        subparser = subparsers.add_parser(name, help=command.HELP, allow_abbrev=False)
        subparser.add_flags = command.add_flags
        subparser.set_defaults(run=command.run)
    return top
