"""Flags of the command line, which derive from config.py and contract/params.py, and the parser that takes them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

import msgspec

from tureen.config import COMMON, Config, fields
from tureen.config_sources import fault_of, load, unknown_variables
from tureen.errors import InvalidRequest, echo

if TYPE_CHECKING:
    from tureen.cli.translation import OwnFlag

COMMON_PARAMS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "sampling_seed",
    "regex",
)
"""Sampling parameters that the short help shows."""
UNITS = {"_s": "SECONDS", "_bytes": "BYTES", "_mib": "MIB"}


class CommandParser(argparse.ArgumentParser):
    """A parser that names every bad flag at once, with the nearest of the command's own, and takes the flags of other
    servers where it takes settings. Flags are added only to the command that runs."""

    add_flags: Callable[[CommandParser], None] | None = None
    takes_settings = False
    rare: frozenset[str] = frozenset()  # what the short help leaves out, by `dest`

    def __init__(self, **more: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "add_help": False, **more})
        text = "=all shows every flag, =WORD those with the word"
        self.add_argument("-h", "--help", action=_Help, nargs="?", const="", metavar="WORD", help=text)

    def complete(self) -> None:
        """Adds the flags that are still missing."""
        if self.add_flags is not None:
            add_flags, self.add_flags = self.add_flags, None
            add_flags(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        arguments = list(sys.argv[1:] if args is None else args)
        is_asked = "_ARGCOMPLETE" in os.environ or {"-h", "--help"}.intersection(arguments)
        if self.takes_settings and not is_asked and self._is_foreign(arguments):
            arguments = self._in_own_words(arguments)
        options, rest = super().parse_known_args(arguments, namespace)
        rest = self._fill(options, rest)
        if rest:
            self.error(
                "\n".join(self._complaint(argument) for argument in rest if argument.startswith("-") or len(rest) == 1)
            )
        return options, rest

    def error(self, message: str) -> NoReturn:
        self.exit(2, "".join(f"{self.prog}: {line}\n" for line in message.split("\n")))

    def format_help(self) -> str:
        return str(importlib.import_module("tureen.cli.help").text(self, ""))

    def own_flags(self) -> dict[str, OwnFlag]:
        """Returns the flags of this command for the translator."""
        own_flag: type[OwnFlag] = importlib.import_module("tureen.cli.translation").OwnFlag
        takes: dict[Any, Any] = {None: "one", 0: "nothing", "?": "maybe", "+": "many", "*": "many"}
        return {
            flag: own_flag(takes[action.nargs], self._fault_of(action), bool(action.choices))
            for flag, action in self._option_string_actions.items()
        }

    def _is_foreign(self, arguments: Sequence[str]) -> bool:
        """Says whether the command line has something that its own flags do not explain."""
        for place, argument in enumerate(arguments):
            name, equals, value = argument.partition("=")
            action = self._option_string_actions.get(name)
            if action is None:
                if len(argument) > 1 and argument[0] == "-" and not argument[1:].replace(".", "").isdigit():
                    return True
            elif action.nargs is None:
                value = value if equals else "".join(arguments[place + 1 : place + 2])
                if self._fault_of(action)(value):
                    return True
        return False

    def _fault_of(self, action: argparse.Action) -> Callable[[str], str]:
        """Returns a function that says why a flag may not have a value; "" where it may."""
        kinds = {field.name: field for field in fields()}
        field = kinds.get(action.dest) if action.nargs is None else None

        def fault(value: str) -> str:
            words = action.choices if field is None else action.choices or get_args(field.type)[1].extra["words"]
            if words:
                return "" if value in words else f"it must be {', '.join(map(str, words))}"
            if field is None:
                return ""
            return fault_of(field.name, (value,) if _is_list(get_args(field.type)[0]) else value)

        return fault

    def _in_own_words(self, arguments: list[str]) -> list[str]:
        """Translates the flags of other servers, and tells so. Ends the program where some cannot be had."""
        translation = importlib.import_module("tureen.cli.translation")
        peers = importlib.import_module("tureen.cli.peer_tables").load_peers()
        result = translation.translate(arguments, self.own_flags(), peers)
        if result.faults:
            self.error("\n".join(result.faults))
        for line in translation.told(result.notes):
            print(f"{self.prog}: {line}", file=sys.stderr)
        return list(result.arguments)

    def _fill(self, options: argparse.Namespace, rest: list[str]) -> list[str]:
        """Gives the command's own argument a word that stands behind flags, which argparse leaves over."""
        for action in self._get_positional_actions():
            is_missing = action.nargs == "?" and getattr(options, action.dest, None) is None
            if is_missing and rest and not rest[0].startswith("-"):
                setattr(options, action.dest, rest.pop(0))
        return rest

    def _complaint(self, argument: str) -> str:
        hint = importlib.import_module("tureen.cli.translation").hint
        return f"unknown argument {argument}{hint(argument.split('=')[0], self._option_string_actions)}"


class _Help(argparse.Action):
    """Prints the help, short without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> NoReturn:
        print(importlib.import_module("tureen.cli.help").text(parser, values or ""), end="")
        parser.exit()


class OneOfModels(argparse.Action):
    """Takes --model-path; given again, it names one more model of a server that has several."""

    def __call__(self, _: Any, namespace: argparse.Namespace, value: Any, __: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        models = getattr(namespace, "models", ())
        if before is None:
            setattr(namespace, self.dest, value)
            namespace.models = ()  # the file's are not meant
            return
        namespace.models = (*(models or ({self.dest: before},)), {self.dest: value})


def subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    commands = [command for action in actions for command in action.choices.values()]
    for command in commands:
        command.complete()
    return [parser, *commands]


def add_config(parser: CommandParser, *, takes_lists: bool = False, groups: Collection[str] | None = None) -> None:
    """Adds one flag per field of Config, grouped. `config_sources.load` checks the values.

    takes_lists: whether several values may follow one flag, which would swallow a command's own argument. groups: those
    whose settings act in this command; None = all.
    """
    parser.takes_settings = True
    parser.rare |= {field.name for field in fields()}.difference(COMMON)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings; flags and TUREEN_* variables win")
    shown: dict[str, argparse._ArgumentGroup] = {}
    for field in fields():
        kind, meta = get_args(field.type)
        if field.name == "models":  # tables in a file, or --model-path repeated
            continue
        if groups is not None and meta.extra["group"] not in groups:
            continue
        group = shown.setdefault(meta.extra["group"], parser.add_argument_group(meta.extra["group"]))
        flags = [f"--{field.name.replace('_', '-')}"] + ([meta.extra["alias"]] if meta.extra["alias"] else [])
        text = meta.description + ("" if field.default in (None, ()) else f" [{field.default}]")
        value = meta.extra["value"] or _metavar(field.name, kind)
        if field.name == "model_path":
            more: dict[str, Any] = {"action": OneOfModels, "default": argparse.SUPPRESS, "metavar": value}
            group.add_argument(*flags, dest=field.name, help=f"{text} Several." if takes_lists else text, **more)
            continue
        _add_flag(group, flags, field.name, kind, text, value=value, takes_lists=takes_lists)


WITHOUT_FLAG = (
    "logit_bias", "allowed_token_ids", "repetition_detection", "custom_params", "stream_interval", "dtype"
)  # fmt: skip
"""Sampling parameters that no command line has."""


def add_params(parser: CommandParser) -> None:
    """Adds one flag per sampling parameter. `--dtype` is the model's."""
    params = msgspec.structs.fields(params_type())
    parser.rare |= {f"param_{field.name}" for field in params if field.name not in COMMON_PARAMS}
    group = parser.add_argument_group("sampling of this output")
    for field in params:
        if field.name in WITHOUT_FLAG:
            continue
        kind, meta = get_args(field.type)
        kind = tuple[str, ...] if field.name == "choice" else kind
        flag, value = f"--{field.name.replace('_', '-')}", _metavar(field.name, kind)
        _add_flag(group, [flag], f"param_{field.name}", kind, meta.description, value=value)


def _add_flag(
    group: argparse._ArgumentGroup,
    flags: list[str],
    dest: str,
    kind: Any,
    text: str,
    *,
    value: str,
    takes_lists: bool = False,
) -> None:
    text = text.replace("%", "%%")
    if kind is bool:
        # of a flag that begins with --no- there is no other that says the opposite
        action: Any = "store_true" if flags[0].startswith("--no-") else argparse.BooleanOptionalAction
        group.add_argument(*flags, dest=dest, action=action, default=argparse.SUPPRESS, help=text)
    elif _is_list(kind):
        how: dict[str, Any] = {"action": "extend", "nargs": "+"} if takes_lists else {"action": "append"}
        group.add_argument(*flags, dest=dest, default=argparse.SUPPRESS, metavar=value, help=text, **how)
    else:
        choices = _words(kind)
        metavar = None if choices else value
        group.add_argument(*flags, dest=dest, choices=choices, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _words(kind: Any) -> tuple[str, ...] | None:
    """Returns the words of a type that is one of a few, or nothing."""
    parts = [kind] if get_origin(kind) is Literal else [part for part in get_args(kind) if part is not NoneType]
    return get_args(parts[0]) if len(parts) == 1 and get_origin(parts[0]) is Literal else None


def _metavar(name: str, kind: Any) -> str:
    """Returns the word for a value in usage lines: its unit, which its name ends with, else its type."""
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            return unit
    kinds = {part for part in (kind, *get_args(kind)) if isinstance(part, type)}
    kinds |= {get_args(part)[0] for part in get_args(kind) if get_args(part)}
    return "N" if int in kinds else "NUMBER" if float in kinds else "TEXT"


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that the command line names."""
    names = set(Config.__struct_fields__)
    settings = {name: value for name, value in vars(options).items() if name in names}
    model = getattr(options, "model", None)
    if model is not None:
        first = {"model_path": model}
        named = settings.get("models") or ({"model_path": settings.get("model_path", model)},)
        others = [table for table in named if table != first]
        settings |= {"model_path": model, "models": (first, *others) if others else ()}  # the file's are not meant
    return settings


def as_flags(options: argparse.Namespace) -> list[str]:
    """Returns the flags that give another command the same settings."""
    flags = [] if options.config is None else ["--config", options.config]
    for name, value in settings_of(options).items():
        if name == "models":  # one model: that of model_path
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    return flags


def params_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling parameters that flags gave, by name. Raises InvalidRequest."""
    values = {name.removeprefix("param_"): value for name, value in vars(options).items() if name.startswith("param_")}
    params: dict[str, Any] = {}
    for name, value in values.items():
        try:
            params |= msgspec.to_builtins(msgspec.convert({name: value}, params_type(), strict=False))
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise InvalidRequest(f"--{name.replace('_', '-')} {echo(value)}: {reason}", field=name) from None
    return params


def load_config(options: argparse.Namespace) -> Config:
    """Merges the flags with environment and file. Raises StartupError."""
    return load(settings_of(options), file=options.config)


def tell_unknown_variables() -> None:
    """Print to stderr which TUREEN_* variables are not settings."""
    for name in unknown_variables():
        print(f"tureen: {name} is not a setting; ignored", file=sys.stderr)


def params_type() -> Any:
    return importlib.import_module("tureen.contract.params").SamplingParams
