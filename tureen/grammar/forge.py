"""Started once: `python -I -m tureen.grammar.forge CONTROL SETUP`. Has all that compiling needs in memory, and forks.

It reads nothing that a client sent: constraints are compiled by children, one at a time each, which can be killed. A
child that was slow, or failed other than by refusing, is not used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from tureen.grammar import helper
from tureen.grammar.backends.registry import find_backend
from tureen.grammar.base import GrammarSpec, Vocabulary
from tureen.grammar.expression import GrammarError
from tureen.grammar.frontends import language_of
from tureen.grammar.orders import (
    BEGUN,
    COMPILE,
    DONE,
    LOWER_AFTER_S,
    MEMORY_BYTES,
    MESSAGE,
    READY,
    Reply,
    Setup,
    broken,
    invalid,
    invalid_code,
    too_complex,
)

IDLE = b"i"
"""What a child says to the forge when it can be used again: it was quick, and nothing is left behind in it."""

LONGEST = 32  # bytes of a token that a trial looks for
MAX_IDLE = 2
MAX_USES = 100
MAX_GROWTH_BYTES = 64 << 20

MAX_REPLY_BYTES = 64 << 20
MAX_QUICK_S = 1.0  # of time, however little of the processor it took

PR_SET_PDEATHSIG = 1
WARM_UP = GrammarSpec(
    "json_schema",
    '{"type": "object", "properties": {"a": {"enum": ["x", 1]}, "b": {"type": "boolean"}, "c": {"type": "null"}}, '
    '"required": ["a", "b"], "additionalProperties": false}',
)
"""Few texts fit it: some backends take a second for any string or number."""


class Child(NamedTuple):
    """A process that compiles, one constraint at a time."""

    pid: int
    connection: socket.socket

    def is_idle(self) -> bool:
        """It says so, once, before it says DONE."""
        with contextlib.suppress(OSError):
            return self.connection.recv(1, socket.MSG_DONTWAIT) == IDLE
        return False


Compile = Callable[[GrammarSpec], bytes]
"""What the engine's backend is to load for a constraint. Raises GrammarError."""

_decoder = msgspec.msgpack.Decoder(GrammarSpec)
_libc = ctypes.CDLL(None)


def main(control: int, setup: int, make_compile: Callable[[Setup], Compile]) -> None:
    """Serve until the engine is gone; then end every child. Descriptors: a socket, and memory with a Setup."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # the server decides when to stop; its end is the end of the socket
    connection = socket.socket(fileno=control)
    settings = msgspec.msgpack.decode(helper.contents(setup), type=Setup)
    os.close(setup)
    compile_ = make_compile(settings)
    warm_up(compile_)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):  # nobody waits any more
        connection.send(READY)
    Nursery(connection, compile_, settings.timeout_s).serve()


def compile_with(setup: Setup) -> Compile:
    """Make the backend."""
    backend = find_backend(setup.backend)(setup.vocabulary, partial(_greedy_tokens, _ids(setup.vocabulary)))
    mask = np.zeros(-(-setup.vocabulary.size // 32), dtype=np.uint32)

    def compile_(spec: GrammarSpec) -> bytes:
        source = backend.translate(language_of(spec))
        grammar = backend.load(source).start()  # what cannot be loaded, or has no first step, is known now
        grammar.fill_mask(mask)
        if not mask.any():
            raise GrammarError(f"no text at all fits this {spec.kind}: its parts contradict each other")
        grammar.forced()
        return source

    return compile_


def _ids(vocabulary: Vocabulary) -> dict[bytes, int]:
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens) if token}


def _greedy_tokens(ids: Mapping[bytes, int], text: str) -> list[int]:
    """In place of the tokenizer, which is not here: the longest token each time. Costs a trial what the tokenizer's
    own tokens would; what it makes is seen by nobody."""
    data, made, at = text.encode(), [], 0
    while at < len(data):
        size = next((size for size in range(min(LONGEST, len(data) - at), 0, -1) if data[at : at + size] in ids), 0)
        if not size:
            return []
        made.append(ids[data[at : at + size]])
        at += size
    return made


class Nursery:
    """The forge's children. One at least waits in advance: a young process is slow until it has pages of its own."""

    def __init__(self, connection: socket.socket, compile_: Compile, timeout_s: float) -> None:
        self._connection = connection
        self._compile = compile_
        self._timeout_s = timeout_s
        self._idle: list[Child] = []
        self._busy: dict[int, Child] = {}  # by the number of the compile
        self._quick: dict[int, Start] = {}  # those of normal priority

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            until_ms = self._lower_slow()
            if not self._idle and not self._quick:  # not while somebody waits for another
                self._idle.append(self._fork(is_early=True))
            if not poll.poll(until_ms):
                continue
            try:
                data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE.size, 2)
            except OSError:
                break
            if not data:
                break
            what, number = MESSAGE.unpack(data)
            if what == COMPILE:
                self._start(number, descriptors)
            elif number in self._busy:
                self._end(number)
        for child in [*self._idle, *self._busy.values()]:
            _bury(child)

    def _start(self, number: int, descriptors: list[int]) -> None:
        child = self._idle.pop() if self._idle else self._fork(is_early=False)
        if os.waitpid(child.pid, os.WNOHANG)[0] != 0:  # where memory is short it is killed first
            child.connection.close()
            child = self._fork(is_early=False)
        with contextlib.suppress(OSError):  # it has ended just now: its pipe says so
            socket.send_fds(child.connection, [b" "], descriptors)
        for one in descriptors:
            os.close(one)
        self._busy[number] = child
        self._quick[number] = Start(time.monotonic(), _processor_s(child.pid))

    def _fork(self, *, is_early: bool) -> Child:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._connection.close()
            ours.close()
            _compile_and_exit(self._compile, Birth(theirs, parent, self._timeout_s, is_early))
        theirs.close()
        return Child(pid, ours)

    def _end(self, number: int) -> None:
        """A child is not reaped before, so that its process id cannot have become another's."""
        child = self._busy.pop(number)
        is_quick = self._quick.pop(number, None) is not None
        if is_quick and len(self._idle) < MAX_IDLE and child.is_idle():
            self._idle.append(child)
        else:
            _bury(child)

    def _lower_slow(self) -> float | None:
        """Take back the priority of those that take long. Milliseconds until the next look, None = there is none."""
        now_s = time.monotonic()
        wait_s = math.inf
        for number, start in list(self._quick.items()):
            pid = self._busy[number].pid
            left_s = start.processor_s + LOWER_AFTER_S - _processor_s(pid)
            if left_s > 0 and now_s < start.time_s + MAX_QUICK_S:
                wait_s = min(wait_s, max(left_s, 0.001))
            else:
                del self._quick[number]
                _lower(pid)
        return math.ceil(wait_s * 1000) if self._quick else None


class Start(NamedTuple):
    """When a compile began."""

    time_s: float
    processor_s: float  # that its process had taken before


def _processor_s(pid: int) -> float:
    """Processor time that another process has taken: its clock is clock_getcpuclockid(3)'s."""
    with contextlib.suppress(OSError):  # it has ended
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0


def _bury(child: Child) -> None:
    child.connection.close()
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)


def _lower(pid: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/task"):
            try:
                os.sched_setscheduler(int(name), os.SCHED_IDLE, os.sched_param(0))
            except PermissionError:  # some sandboxes allow nice(2) only
                os.setpriority(os.PRIO_PROCESS, int(name), 19)


class Birth(NamedTuple):
    """What a child is born with."""

    connection: socket.socket  # where two descriptors come for each compile: see COMPILE
    parent: int  # process id
    timeout_s: float
    is_early: bool


def _compile_and_exit(compile_: Compile, birth: Birth) -> NoReturn:
    try:
        gc.disable()
        _confine(birth)
        if birth.is_early:
            warm_up(compile_)
        most_bytes = helper.address_space() + MAX_GROWTH_BYTES
        for _ in range(MAX_USES):
            _limit_time(birth.timeout_s)
            _, descriptors, _, _ = socket.recv_fds(birth.connection, 1, 2)
            if not descriptors:
                break
            memory, pipe = descriptors
            os.write(pipe, BEGUN)
            spec = _decoder.decode(helper.contents(memory))
            reply = _reply(compile_, spec)
            helper.overwrite(memory, msgspec.msgpack.encode(reply))
            is_sound = reply.failure is None or reply.failure.code == invalid_code(spec)
            if is_sound and helper.address_space() < most_bytes:
                birth.connection.send(IDLE)
            os.write(pipe, DONE)
            os.close(memory)
            os.close(pipe)
            gc.collect()
    finally:
        os._exit(0)


def _limit_time(timeout_s: float) -> None:
    cpu_s = math.ceil(time.process_time() + timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))


def _confine(birth: Birth) -> None:
    """Bound what this process can take, and how long it can live."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != birth.parent:
        os._exit(1)
    helper.confine(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_REPLY_BYTES, MAX_REPLY_BYTES))


def warm_up(compile_: Compile) -> None:
    """Build what is built when it is first needed, and get own copies of the pages that are written to."""
    _reply(compile_, WARM_UP)


def _reply(compile_: Compile, spec: GrammarSpec) -> Reply:
    try:
        return Reply(compile_(spec))
    except GrammarError as error:
        return Reply(failure=invalid(spec, error))
    except MemoryError:
        return Reply(failure=too_complex(spec, f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"))
    except RecursionError:
        return Reply(failure=too_complex(spec, "it is nested too deeply"))
    except BaseException as error:  # noqa: BLE001 (a Rust library's panic is no Exception; none may pass for a crash)
        return Reply(failure=broken(spec, error))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), compile_with)
