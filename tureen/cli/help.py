"""Writes the help of commands: short, all of it, or what has a word in it."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable

from tureen.cli.flags import CommandParser

WIDTH = 100
FIRST_STEPS = """\
tureen serves language models over HTTP.

  tureen serve                     starts a server with a small model
  tureen serve MODEL               with a folder, a .gguf file or a name on the Hugging Face hub
  tureen chat                      a chat in the terminal, with a running server or its own model
  tureen generate "Once upon"      continues a text without a server
  tureen migrate -- vllm serve …   translates a command of another server

commands:
"""


def text(parser: CommandParser, word: str) -> str:
    """Returns the help. word: "" = the commonest flags, "all" = every flag, else those in whose
    name or help a word begins with it."""
    if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions) and parser.prog == "tureen":
        return first_steps(parser)
    parser.complete()
    groups = [
        (group.title or "", [action for action in group._group_actions if _is_shown(parser, action, word)])
        for group in parser._action_groups
    ]
    shown = sum(len(actions) for _, actions in groups)
    total = sum(action.help != argparse.SUPPRESS for group in parser._action_groups for action in group._group_actions)
    usage = " ".join([f"usage: {parser.prog}", *_positionals(parser), "[FLAG …]"])
    parts = [usage, *([parser.description] if parser.description else [])]
    parts += ["\n".join([f"{title}:", *map(_lines, actions)]) for title, actions in groups if actions]
    if word not in ("", "all") and not shown:
        parts.append(f"no flag has a word starting with {word!r} in its name or its help")
    if shown < total:
        parts.append(f"{total - shown} more: {parser.prog} --help=all shows every flag, --help=WORD those with WORD.")
    return "\n\n".join(parts) + "\n"


def first_steps(parser: argparse.ArgumentParser) -> str:
    """Returns what to do first, and the commands."""
    [actions] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    lines = [f"  {choice.metavar or choice.dest:<12} {choice.help}" for choice in actions._choices_actions]
    return FIRST_STEPS + "\n".join([*lines, "", "tureen COMMAND --help shows its flags."]) + "\n"


def _is_shown(parser: CommandParser, action: argparse.Action, word: str) -> bool:
    if action.help == argparse.SUPPRESS:
        return False
    if word in ("", "all"):
        return word == "all" or action.dest not in parser.rare
    written = " ".join([*action.option_strings, action.dest, action.help or ""]).lower()
    return re.search(rf"(?<![a-z0-9]){re.escape(word.lower().lstrip('-'))}", written) is not None


def _positionals(parser: argparse.ArgumentParser) -> Iterable[str]:
    for action in parser._get_positional_actions():
        if not isinstance(action, argparse._SubParsersAction):
            name = action.metavar or action.dest
            yield f"[{name}]" if action.nargs in ("?", "*") else str(name)


def _lines(action: argparse.Action) -> str:
    names = [name for name in action.option_strings if not name.startswith("--no-")] or action.option_strings
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    takes = "" if action.nargs == 0 else f"[={value}]" if action.option_strings and action.nargs == "?" else f" {value}"
    if not names:
        names, takes = [str(action.metavar or action.dest)], ""
    head = f"  {', '.join(names)}{takes}"
    width = min(WIDTH, shutil.get_terminal_size().columns)
    body = textwrap.wrap((action.help or "").replace("%%", "%"), max(30, width - 32))
    if len(head) > 30:
        body.insert(0, "")
    head = head if body[:1] == [""] or not body else f"{head:<32}{body.pop(0)}"
    return "\n".join([head, *(" " * 32 + line for line in body if line)])
