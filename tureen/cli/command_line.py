"""The `tureen` command. Each file of `commands` is one subcommand, which says what it does and takes its own flags."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

from tureen import __version__
from tureen.cli import commands
from tureen.cli.flags import CommandParser, subparsers
from tureen.errors import TureenError
from tureen.extras import why_missing

OWN_FLAGS = ("-h", "--help", "--version")
"""Flags that stand without a command."""

ALIASES = {"run": "chat"}
"""Another name of a command -> its own. Ollama's users type `run`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status. Errors that a user can cause are lines on stderr, with status 1.

    Raises BrokenPipeError.
    """
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            _flush()  # here, where an error is still reported
    except TureenError as error:
        return _report(error.message)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tureen"):
            raise  # our own fault
        return _report(why_missing(error.name))
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _report(f"{where}{error.strerror or error or type(error).__name__}")
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        _complete(os.environ.get("COMP_LINE", "").split()[1:])
    if not arguments:
        print(parser().format_help(), end="")
        return 0
    if arguments[0] == "help":
        arguments = [*arguments[1:2], "--help"]
    options = parser(arguments).parse_args(arguments)
    return int(options.run(options))


def _flush() -> None:
    """Flush stdout. Raises OSError, and then drops the buffer, so that Python does not retry at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None
        raise OSError(error.errno, error.strerror, "stdout") from None


def _report(message: str) -> int:
    """Prints an error, a line on stderr or several. Returns the exit status."""
    for line in message.split("\n"):
        print(f"tureen: {line}", file=sys.stderr)
    return 1


def parser(arguments: Sequence[str] = ()) -> CommandParser:
    """Returns the parser of the subcommand that the arguments begin with; of all, where they begin with none."""
    top = CommandParser(prog="tureen", description="An LLM serving runtime.")
    top.add_argument("--version", action="version", version=f"tureen {__version__}")
    names, first = _names(), _command_of(arguments)
    if arguments and not arguments[0].startswith("-") and first is None:
        hint = importlib.import_module("tureen.cli.translation").hint
        top.error(f"there is no command {arguments[0]}{hint(arguments[0], dict.fromkeys([*names, *ALIASES]))}")
    if arguments and arguments[0].startswith("-") and not arguments[0].startswith(OWN_FLAGS):
        top.error(f"{arguments[0]} comes before a command: tureen serve {' '.join(arguments)}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name in names if first is None else [first]:
        command = importlib.import_module(f"{commands.__name__}.{name}")
        aliases = [alias for alias, of in ALIASES.items() if of == name]
        subparser = subparsers.add_parser(name, aliases=aliases, help=command.HELP, description=command.HELP)
        subparser.add_flags = command.add_flags
        subparser.set_defaults(run=command.run)
    return top


def _command_of(arguments: Sequence[str]) -> str | None:
    """Return the command that the arguments begin with."""
    name = ALIASES.get(arguments[0], arguments[0]) if arguments else None
    return name if name in _names() else None


def _names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(commands.__path__)]


def _complete(words: list[str]) -> None:
    """Tells the shell what may come next, and ends the program. words: the command line behind `tureen`."""
    top = parser(words[:1] if _command_of(words) else ())
    subparsers(top)  # argcomplete wants all flags to be there before it parses
    importlib.import_module("argcomplete").autocomplete(top, exclude=["-h"])
