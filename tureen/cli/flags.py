"""Flags of the command line, which derive from config.py and contract/params.py, and the parser that takes them."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Callable, Collection
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec

from tureen.config import Config, fields, load
from tureen.errors import InvalidRequest, echo


class CommandParser(argparse.ArgumentParser):
    """A parser that suggests the nearest flag for a mistyped one. Flags are added only to the command that runs."""

    add_flags: Callable[[CommandParser], None] | None = None

    def complete(self) -> None:
        """Adds the flags that are still missing."""
        if self.add_flags is not None:
            add_flags, self.add_flags = self.add_flags, None
            add_flags(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [flag for command in subparsers(self) for flag in command._option_string_actions]
            hints = difflib.get_close_matches(rest[0].split("=")[0], known, n=1)
            self.error(f"unknown argument {rest[0]}" + (f"; did you mean {hints[0]}?" if hints else ""))
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


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


def add_config(
    parser: argparse.ArgumentParser, *, takes_lists: bool = False, groups: Collection[str] | None = None
) -> None:
    """Adds one flag per field of Config, grouped. `config.load` checks the values.

    takes_lists: whether several values may follow one flag, which would swallow a command's own argument. groups: those
    whose settings act in this command; None = all.
    """
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
        text = f"{meta.description} [{_show(field.default)}]"
        if field.name == "model_path" and takes_lists:
            more: dict[str, Any] = {"action": OneOfModels, "default": argparse.SUPPRESS, "metavar": "VALUE"}
            group.add_argument(*flags, dest=field.name, help=f"{text} Several.", **more)
            continue
        _add_flag(group, flags, field.name, kind, text, takes_lists=takes_lists)


def add_params(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per sampling parameter. `--dtype` is the model's."""
    group = parser.add_argument_group("sampling")
    for field in msgspec.structs.fields(params_type()):
        if field.name in ("logit_bias", "allowed_token_ids", "custom_params", "stream_interval", "dtype"):
            continue
        kind, meta = get_args(field.type)
        kind = tuple[str, ...] if field.name == "choice" else kind
        _add_flag(group, [f"--{field.name.replace('_', '-')}"], f"param_{field.name}", kind, meta.description)


def _add_flag(
    group: argparse._ArgumentGroup, flags: list[str], dest: str, kind: Any, text: str, *, takes_lists: bool = False
) -> None:
    text = text.replace("%", "%%")
    if kind is bool:
        group.add_argument(
            *flags, dest=dest, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    elif get_origin(kind) is tuple:
        how: dict[str, Any] = {"action": "extend", "nargs": "+"} if takes_lists else {"action": "append"}
        group.add_argument(*flags, dest=dest, default=argparse.SUPPRESS, metavar="VALUE", help=text, **how)
    else:
        choices = get_args(kind) if get_origin(kind) is Literal else None
        metavar = None if choices else "VALUE"
        group.add_argument(*flags, dest=dest, choices=choices, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _show(default: object) -> str:
    return "auto" if default is None else str(default)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that flags gave, by name."""
    names = set(Config.__struct_fields__)
    return {name: value for name, value in vars(options).items() if name in names}


def as_flags(options: argparse.Namespace) -> list[str]:
    """Returns the flags that give another command the same settings."""
    flags = [] if options.config is None else ["--config", options.config]
    for name, value in settings_of(options).items():
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


def params_type() -> Any:
    return importlib.import_module("tureen.contract.params").SamplingParams
