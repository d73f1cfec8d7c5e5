"""A compiler that does what a constraint says: `sleep /a/file` writes its worker's process id there first."""

from __future__ import annotations

import threading
from collections import defaultdict

import inline_workers

from tureen.grammar.expression import GrammarError
from tureen.grammar_service.messages import CompileReply

_waiting: defaultdict[str, list[threading.Event]] = defaultdict(list)
_gone: set[str] = set()


def go(path):
    """Have what waits `until` that file go on."""
    _gone.add(str(path))
    for event in _waiting.pop(str(path), ()):
        event.set()


def wait_until_go(path):
    event = threading.Event()
    _waiting[path].append(event)
    if path in _gone:
        event.set()
    inline_workers.wait_for(event)


class Panic(BaseException):
    """As those of Rust libraries are."""


def recurse():
    recurse()


def refuse():
    raise GrammarError("the keyword 'foo' is not enforced")


def panic():
    raise Panic("with words of the client")


def fault():
    raise KeyError("with words of the client")


def take_memory():
    raise MemoryError


def end():
    inline_workers.at_work().lose(inline_workers.ended_by_itself)


ACTIONS = {
    "recurse": recurse,
    "refuse": refuse,
    "panic": panic,
    "fault": fault,
    "memory": take_memory,
    "crash": end,
    "exit": end,
    "sleep": inline_workers.wait_until_lost,
    "spin": inline_workers.wait_until_lost,
}


def make_compile(setup):
    def compile_(spec):
        return CompileReply(source(spec))

    def source(spec):
        what, _, path = spec.text.partition(" ")
        if path.startswith("/"):
            with open(path, "a") as file:
                file.write(f"{inline_workers.at_work().pid}\n")
        if what == "until":
            wait_until_go(path)
        elif what == "vocabulary":
            tokens = setup.vocabulary.tokens
            return repr((len(tokens), tokens[-1], setup.vocabulary.size)).encode()
        elif what == "large":
            return bytes(int(path))
        ACTIONS.get(what, lambda: None)()
        return f"double: {spec.text}".encode()

    return compile_
