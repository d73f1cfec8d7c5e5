"""Runs what is typed behind a slash: the table COMMANDS has a function for each."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tureen.cli.chat.connection import ChatError
from tureen.cli.chat.conversation import Conversation, Cost, Message, load
from tureen.cli.places import counted
from tureen.contract.params import SamplingParams
from tureen.files import read_regular

NOT_SETTINGS = ("n", "custom_params", "stream_interval")
"""Sampling parameters that mean nothing in a chat."""

OPENAI_NAMES = {"seed": "sampling_seed", "max_tokens": "max_new_tokens"}
"""OpenAI's name of a sampling parameter -> ours. `/set` takes both."""


class Command(NamedTuple):
    """One command: what may follow it, what it does, and the function that does it."""

    argument: str
    does: str
    function: Callable[[Conversation, str], Done]


class Done(NamedTuple):
    """A command was run: what it says, and what the chat does next."""

    text: str = ""
    asks: bool = False  # the last message is answered (again)
    draft: str = ""  # text that the next prompt begins with
    ends: bool = False
    conversation: Conversation | None = None  # goes on in place of the present one


def run(line: str, conversation: Conversation) -> Done:
    """Runs `/command rest`. Raises ChatError, for an unknown one too."""
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get("exit" if name in EXITS else name)
    if command is None:
        raise ChatError(
            f"/{name} is not a command; /help lists them. To send a message that begins with a slash, write //"
        )
    return command.function(conversation, rest.strip())


def do_help(conversation: Conversation, rest: str) -> Done:
    """Returns a line for each command."""
    lines = [f"{f'/{name} {command.argument}':<16} {command.does}" for name, command in COMMANDS.items()]
    return Done("\n".join([*lines, "Enter sends, Alt+Enter begins a new line, Ctrl+C stops an answer, Ctrl+D ends"]))


def do_system(conversation: Conversation, rest: str) -> Done:
    """Sets or shows the system prompt."""
    if rest:
        conversation.system = "" if rest == "off" else rest
    return Done(conversation.system or "no system prompt")


def do_set(conversation: Conversation, rest: str) -> Done:
    """Sets, takes away or shows sampling parameters. Raises ChatError."""
    name, _, value = rest.partition(" ")
    if name and name not in settings():
        near = difflib.get_close_matches(name, settings(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(settings())}"
        raise ChatError(f"{name} is not a sampling parameter; {hint}")
    if value.strip() == "off":
        conversation.settings.pop(name, None)
    elif value:
        conversation.settings[name] = _setting(name, value.strip())
    elif name:
        raise ChatError(f"/set {name} needs a value")
    shown = (f"{key} {json.dumps(chosen, ensure_ascii=False)}" for key, chosen in conversation.settings.items())
    return Done("\n".join(shown) or "nothing is set: the server's defaults")


def do_schema(conversation: Conversation, rest: str) -> Done:
    """Sets the schema of answers. Raises ChatError."""
    if rest == "off":
        conversation.schema = None
    elif rest:
        conversation.schema = _schema(Path(rest))
    return Done("answers are free text" if conversation.schema is None else "answers follow the schema")


def do_regen(conversation: Conversation, rest: str) -> Done:
    """Removes the last answer and asks for another. Raises ChatError."""
    text = conversation.take_back()
    conversation.messages.append(Message("user", text))
    seed = next((name for name in ("seed", "sampling_seed") if name in conversation.settings), None)
    note = "" if seed is None else f"the seed is set, so the answer will be the same: /set {seed} off"
    return Done(note, asks=True)


def do_edit(conversation: Conversation, rest: str) -> Done:
    """Takes a message back. Raises ChatError."""
    if rest and not rest.isdecimal():
        raise ChatError(f"/edit {rest}: the number of one of your messages, from 1")
    return Done(draft=conversation.take_back(int(rest) if rest else None))


def do_save(conversation: Conversation, rest: str) -> Done:
    """Writes the conversation. Raises ChatError."""
    if not rest:
        raise ChatError("/save needs the name of a file")
    conversation.save(Path(rest))
    return Done(f"saved in {rest}")


def do_load(conversation: Conversation, rest: str) -> Done:
    """Reads a conversation. Raises ChatError."""
    if not rest:
        raise ChatError("/load needs the name of a file")
    saved = load(Path(rest))
    saved.model = conversation.model
    return Done(counted(len(saved.messages), "message"), conversation=saved)


def do_clear(conversation: Conversation, rest: str) -> Done:
    """Forgets the messages."""
    conversation.messages.clear()
    return Done("forgotten")


def do_stats(conversation: Conversation, rest: str) -> Done:
    """Returns what the last answer took, and all of them."""
    if not conversation.costs:
        return Done("no answer yet")
    total = sum(cost.completion_tokens for cost in conversation.costs)
    answers = counted(len(conversation.costs), "answer")
    return Done(f"last: {describe(conversation.costs[-1])}\nall: {answers}, {counted(total, 'token')}")


def do_exit(conversation: Conversation, rest: str) -> Done:
    """Ends the chat."""
    return Done(ends=True)


EXPECTED = re.compile(r"Expected `(?P<kind>\w+)[^`]*`(?P<bound> [<>]=? [\d.]+)?.*")
KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a text", "array": "a list"}
"""Names of types in msgspec's errors -> words."""

EXITS = ("bye", "quit")
"""Other names of `exit`, which Ollama's users type."""

COMMANDS = {
    "help": Command("", "shows these lines", do_help),
    "system": Command("TEXT", "the system prompt; without TEXT: show it; off removes it", do_system),
    "set": Command(
        "NAME VALUE",
        "a sampling parameter, such as temperature 0.2; VALUE off = the server's; without arguments: show them",
        do_set,
    ),
    "schema": Command("FILE", "answers are JSON of this JSON schema from now on; off ends that", do_schema),
    "regen": Command("", "answers the last message again", do_regen),
    "edit": Command(
        "[N]", "takes your last message, or your N-th, back into the prompt; what follows it is removed", do_edit
    ),
    "save": Command("FILE", "writes the conversation as JSON", do_save),
    "load": Command("FILE", "continues a saved conversation", do_load),
    "clear": Command("", "forgets the messages; system prompt and settings stay", do_clear),
    "stats": Command("", "shows tokens, times and speeds of the answers", do_stats),
    "exit": Command("", "ends the chat", do_exit),
}


def settings() -> list[str]:
    """Returns the names of what `/set` takes: sampling parameters, and what OpenAI calls two of them."""
    return [*OPENAI_NAMES, *(name for name in SamplingParams.__struct_fields__ if name not in NOT_SETTINGS)]


def describe(cost: Cost) -> str:
    """Returns what an answer took, in one line."""
    cached = f" ({cost.cached_tokens:,} cached)" if cost.cached_tokens else ""
    rate = "" if cost.tokens_per_s is None else f", {cost.tokens_per_s:,.1f} tokens/s"
    return (
        f"{counted(cost.prompt_tokens, 'token')} of prompt{cached}, {cost.completion_tokens:,} of answer, "
        f"first after {cost.first_token_s * 1000:,.0f} ms{rate}"
    )


def _setting(name: str, text: str) -> Any:
    """Return a sampling parameter's value from a text: JSON, plain text, or the only entry of a list. Raises
    ChatError."""
    field = OPENAI_NAMES.get(name, name)
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    faults = []
    for candidate in (value, text, [value]):
        try:
            msgspec.convert({field: candidate}, SamplingParams, str_keys=True)
            return candidate
        except msgspec.ValidationError as error:
            faults.append(str(error))
    raise ChatError(f"{name} must be {EXPECTED.sub(_in_words, faults[0], count=1)}, got {text}", field=name)


def _in_words(expected: re.Match[str]) -> str:
    """Returns the words for a type and its bound in an error of msgspec."""
    return KINDS.get(expected["kind"], expected["kind"]) + (expected["bound"] or "")


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(read_regular(path.expanduser()))
    except OSError as error:
        raise ChatError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ChatError(f"{path} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ChatError(f"{path} must be a JSON schema: an object")
    return schema
