"""Shows a chat in the terminal: the prompt with its history and completion, answers as they come."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tureen.cli.chat import slash
from tureen.cli.chat.connection import ChatError, ServerAddress
from tureen.cli.chat.conversation import AnswerPiece, Conversation, Message

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters with which a text could move the cursor, paint over other text or turn its direction."""

WIDE = re.compile(
    "[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\U0001f300-\U0003fffd]"
)
"""Characters that take two columns; a line may end between them."""

WORDS = re.compile(rf"\s|{WIDE.pattern}|[^\s{WIDE.pattern[1:-1]}]+")

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
    """Prints an answer as it arrives, on a terminal with dim reasoning and lines that end between words. Ctrl+C ends it
    and keeps the text so far."""
    is_terminal, was_thought = sys.stdout.isatty(), False
    lines = Lines(shutil.get_terminal_size().columns if is_terminal else None)
    with _unseen_typing():
        try:
            with closing(pieces):  # type: ignore[type-var]
                for piece in pieces:
                    if is_terminal and piece.is_thought != was_thought:
                        print(lines.end() + (DIM if piece.is_thought else f"{PLAIN}\n"), end="")
                    was_thought = piece.is_thought
                    print(lines.add(printable(piece.text)), end="", flush=True)
        except KeyboardInterrupt:
            print(f"{lines.end()} …", end="")
        finally:
            print(lines.end() + (PLAIN if is_terminal and was_thought else ""), flush=True)


class Lines:
    """Breaks streamed text into lines between words. Holds a word back until it is complete."""

    def __init__(self, width: int | None) -> None:
        """`width`: columns of a line; None = the text is left as it is."""
        self._width = width
        self._column = 0
        self._word = ""
        self._goes_on = False  # what was printed last is a part of a word that is longer than a line

    def add(self, text: str) -> str:
        """Return what can be printed after another piece of the text."""
        if self._width is None:
            return text
        *words, last = ["", *WORDS.findall(self._word + text)]
        is_long = len(last) >= self._width
        is_whole = is_long or last.isspace() or WIDE.fullmatch(last)
        self._word = "" if is_whole else last
        shown = "".join(map(self._placed, [*words, last] if is_whole else words))
        self._goes_on = is_long or (self._goes_on and not shown)
        return shown

    def end(self) -> str:
        """Return the word that is held back; the next text begins a line."""
        rest, self._word = self._placed(self._word), ""
        self._column, self._goes_on = 0, False
        return rest

    def _placed(self, word: str) -> str:
        """Return a word, or a space, in its line or in a new one."""
        if word in ("", "\n"):
            self._column = 0 if word else self._column
            return word
        width = sum(2 if WIDE.fullmatch(each) else 1 for each in word)
        fits = self._width is None or not self._column or self._goes_on or self._column + width <= self._width
        self._goes_on = False
        if not fits and word.isspace():
            self._column = 0
            return "\n"
        self._column = width + (self._column if fits else 0)
        return word if fits else f"\n{word}"


@contextmanager
def _unseen_typing() -> Iterator[None]:
    """Turns the terminal's echo off, so that typing does not appear in the answer; the next prompt reads it."""
    termios = importlib.import_module("termios") if importlib.util.find_spec("termios") and sys.stdin.isatty() else None
    if termios is None:
        yield
        return
    usual = termios.tcgetattr(sys.stdin)
    silent = [*usual]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, usual)


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
