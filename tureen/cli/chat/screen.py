"""Shows a chat in the terminal: the prompt with its history and completion, answers as they come."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tureen.cli.chat import slash
from tureen.cli.chat.connection import ChatError, ServerAddress
from tureen.cli.chat.conversation import AnswerPiece, Conversation, Message

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters with which a text could move the cursor, paint over other text or turn its direction."""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def printable(text: str) -> str:
    """Returns a model's text with control characters written out, so that a terminal does nothing but show it."""
    return CONTROLS.sub(lambda match: ascii(match.group())[1:-1], text.replace("\r\n", "\n"))


def chat(conversation: Conversation, server: ServerAddress, history: Path, context_len: int) -> None:
    """Reads messages and commands and shows answers, until the user ends it."""
    session, draft = _session(history), ""
    while True:
        try:
            line = session.prompt("> ", default=draft, bottom_toolbar=_toolbar(conversation, context_len)).strip()
        except KeyboardInterrupt:
            draft = ""
            continue
        except EOFError:
            return
        draft = ""
        if not line:
            continue
        try:
            done = _take(line, conversation)
            conversation, draft = done.conversation or conversation, done.draft
            say(done.text)
            if done.ends:
                return
            if done.asks:
                show(conversation.answer(server))
                note_end(conversation)
        except ChatError as error:
            say(f"! {error.message}")
        if conversation.messages and conversation.messages[-1].role == "user":  # nothing came: it may be mended
            draft = conversation.take_back()


def _take(line: str, conversation: Conversation) -> slash.Done:
    """Runs a command, or appends a message to be answered."""
    if line.startswith("/") and not line.startswith("//"):
        return slash.run(line, conversation)
    conversation.messages.append(Message("user", line.removeprefix("/") if line.startswith("//") else line))
    return slash.Done(asks=True)


def show(pieces: Iterator[AnswerPiece]) -> None:
    """Prints an answer as it comes, its reasoning dim on a terminal. Ctrl+C ends it; what came stays."""
    is_terminal, was_thought = sys.stdout.isatty(), False
    try:
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                if is_terminal and piece.is_thought != was_thought:
                    print(DIM if piece.is_thought else f"{PLAIN}\n", end="")
                was_thought = piece.is_thought
                print(printable(piece.text), end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    finally:
        print(PLAIN if is_terminal and was_thought else "", flush=True)


def note_end(conversation: Conversation) -> None:
    """Says that the last answer was cut at a limit."""
    turn = conversation.messages[-1]
    if turn.role == "assistant" and turn.was_cut:
        say("(cut short)")


def say(text: str) -> None:
    """Prints what the chat itself has to say: dim on a terminal; else on standard error, apart from the answer."""
    if not text:
        return
    if sys.stdout.isatty():
        print(f"{DIM}{printable(text)}{PLAIN}", flush=True)
    else:
        print(printable(text), file=sys.stderr, flush=True)


def _toolbar(conversation: Conversation, context_len: int) -> str:
    cost = conversation.costs[-1] if conversation.costs else None
    used = "" if cost is None else f" · {cost.prompt_tokens + cost.completion_tokens:,} of {context_len:,} tokens"
    return f"{conversation.model}{used} · /help"


def _session(history: Path) -> PromptSession[str]:
    from prompt_toolkit import PromptSession  # noqa: PLC0415 - for terminals only
    from prompt_toolkit.completion import NestedCompleter  # noqa: PLC0415
    from prompt_toolkit.history import FileHistory  # noqa: PLC0415
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent  # noqa: PLC0415

    keys = KeyBindings()

    @keys.add("enter")
    @keys.add("c-j")  # an Enter that was typed while an answer came
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    words = {f"/{name}": None for name in slash.COMMANDS} | {"/set": dict.fromkeys(slash.settings())}
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)
    return PromptSession(
        history=FileHistory(str(history)),
        completer=NestedCompleter.from_nested_dict(words),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
    )
