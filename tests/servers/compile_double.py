"""A fork server whose compiler does what a constraint says: `sleep /a/file` writes its process id there first."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from tureen.grammar.expression import GrammarError
from tureen.grammar_service import compile_worker
from tureen.grammar_service.messages import CompileReply
from tureen.sandbox import fork_server

sys.path.append(str(Path(__file__).parents[1]))  # the interpreter of a fork server adds nothing by itself
from fault_injection import MISDEEDS

compile_worker.LIMITS = compile_worker.LIMITS._replace(memory_bytes=64 << 20, is_sealed=False)


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


def make_compile(setup):
    actions = MISDEEDS | {
        "recurse": recurse,
        "refuse": refuse,
        "panic": panic,
        "fault": fault,
    }

    def compile_(spec):
        return CompileReply(source(spec))

    def source(spec):
        what, _, path = spec.text.partition(" ")
        if path.startswith("/"):
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")
        if what == "until":  # somebody makes a second file
            while not os.path.exists(path + ".go"):
                time.sleep(0.001)
        elif what == "vocabulary":
            tokens = setup.vocabulary.tokens
            return repr((len(tokens), tokens[-1], setup.vocabulary.size)).encode()
        elif what == "large":
            return bytes(int(path))
        actions.get(what, lambda: None)()
        return f"double: {spec.text}".encode()

    return compile_


if __name__ == "__main__":
    assert Path(sys.argv[0]).name == "compile_double.py"
    fork_server.main(partial(compile_worker.program, make_compile))
