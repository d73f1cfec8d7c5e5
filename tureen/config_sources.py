"""Merges the settings of the command line, the environment and a file, and says what is wrong in each.

Imports: config, errors, files; msgspec.
Imported by: cli, offline.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from tureen.config import ENV_PREFIX, Config, fields
from tureen.errors import StartupError, echo
from tureen.files import read_text


def load(
    arguments: Mapping[str, Any], *, file: str | None = None, environment: Mapping[str, str] = os.environ
) -> Config:
    """Merges settings: arguments, then TUREEN_* variables, then the TOML file, then defaults.

    arguments: the command line's, by field name. file: path of the TOML file. Raises StartupError with a line for each
    setting that is unknown or out of range, and where it came from.
    """
    settings = origins(arguments, file=file, environment=environment)
    return Config(**{name: value for name, (value, _) in settings.items()})


def origins(
    arguments: Mapping[str, Any], *, file: str | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, tuple[Any, str]]:
    """Returns each setting that is not left at its default: its value, and where it comes from. Arguments and errors:
    see `load`."""
    merged: dict[str, tuple[Any, str]] = {}
    faults = [f"{wrong} is not a setting; did you mean {right}?" for wrong, right in _misspelt(environment).items()]
    for source, values in (
        (f"in {file}", _from_file(file)),
        ("in the environment", _from_environment(environment)),
        ("on the command line", arguments),
    ):
        for name, value in values.items():
            try:
                merged[name] = converted(name, value), source
            except msgspec.ValidationError as error:
                faults.append(f"setting {source}: {_told(name, value, error)}")
    if faults:
        raise StartupError("\n".join(faults))
    return merged


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the TUREEN_* variables that are not settings, without those for which `load` raises an error."""
    known = {ENV_PREFIX + name.upper() for name in Config.__struct_fields__} | _misspelt(environment).keys()
    return sorted(name for name in environment if name.startswith(ENV_PREFIX) and name not in known)


def _from_file(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        text = read_text(file)
    except OSError as error:
        raise StartupError(f"--config {file}: cannot read it: {error.strerror}") from None
    except ValueError:
        raise StartupError(f"--config {echo(file)}: is not UTF-8, or is not a valid file name") from None
    try:
        return {key.replace("-", "_"): value for key, value in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"--config {file}: not valid TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = set(Config.__struct_fields__)
    values = {
        key.removeprefix(ENV_PREFIX).lower(): value for key, value in environment.items() if key.startswith(ENV_PREFIX)
    }
    return {name: value for name, value in values.items() if name in names}


def _misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Return each variable that is nearly a setting's, and that setting's; others may belong to another program."""
    known = {name.upper(): f"{ENV_PREFIX}{name.upper()}" for name in Config.__struct_fields__}
    anagrams = {"".join(sorted(name)): name for name in known}
    misspelt = {}
    for wrong in environment:
        name = wrong.removeprefix(ENV_PREFIX)
        if wrong == name:
            prefix, _, name = wrong.partition("_")
            if name in known and difflib.get_close_matches(f"{prefix}_", [ENV_PREFIX], cutoff=0.85):
                misspelt[wrong] = known[name]
            continue
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85) or [anagrams.get("".join(sorted(name)), "")]
        if near[0]:
            misspelt[wrong] = known[near[0]]
    return misspelt


def fault_of(name: str, value: Any) -> str:
    """Says why a setting may not have a value; "" where it may."""
    try:
        converted(name, value)
    except msgspec.ValidationError as error:
        allowed = _allowed(name)
        return f"it must be {allowed}" if allowed else str(error).replace(f" - at `$.{name}`", "")
    return ""


def _told(name: str, value: Any, error: msgspec.ValidationError) -> str:
    flag, allowed = f"--{name.replace('_', '-')}", _allowed(name)
    if allowed:
        return f"{flag} {echo(value)}: it must be {allowed}"
    return f"{str(error).replace(f'`$.{name}', f'`{flag}')}{_meant(name)}"


def converted(name: str, value: Any) -> Any:
    """Returns a setting's value in its type; text may become a number. Raises msgspec.ValidationError."""
    try:
        return getattr(msgspec.convert({name: value}, Config, strict=False), name)
    except msgspec.ValidationError:
        if not isinstance(value, str) or not value.isdecimal():
            raise
    return getattr(msgspec.convert({name: int(value)}, Config), name)  # a number or other text: msgspec takes the text


def _meant(name: str) -> str:
    """Returns a question with the nearest setting, where this is none."""
    near = [] if name in Config.__struct_fields__ else difflib.get_close_matches(name, Config.__struct_fields__, n=1)
    return f"; did you mean {near[0].replace('_', '-')}?" if near else ""


def _allowed(name: str) -> str:
    """Returns what a setting may be, where that are words and numbers; else "", as for what is no setting."""
    kinds = [msgspec.inspect.type_info(field.type) for field in fields() if field.name == name]
    parts: list[str] = []
    while kinds:
        match kinds.pop(0):
            case msgspec.inspect.Metadata(type=kind):
                kinds.insert(0, kind)
            case msgspec.inspect.UnionType(types=types):
                kinds += types
            case msgspec.inspect.LiteralType(values=words):
                parts += map(str, words)
            case msgspec.inspect.BoolType():
                parts += ["true", "false"]
            case msgspec.inspect.IntType() as number:
                parts.append(f"a whole number{_bounds(number)}")
            case msgspec.inspect.FloatType() as number:
                parts.append(f"a number{_bounds(number)}")
            case msgspec.inspect.NoneType():
                pass  # said by leaving it out
            case _:
                return ""
    return ", ".join(parts)


def _bounds(number: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    if isinstance(number.ge, int) and number.le is not None:
        return f" from {number.ge} to {number.le}"
    names = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    limits = {words: bound for name, words in names.items() if (bound := getattr(number, name)) is not None}
    bounds = [f"{words} {bound if isinstance(bound, int) else f'{bound:g}'}" for words, bound in limits.items()]
    return f" of {' and '.join(bounds)}" if bounds else ""
