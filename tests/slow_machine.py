"""What in a test's source depends on the machine's pace: sleeping, reading a clock, limits that a busy machine passes.

A test waits for an event, polls with `timeouts.wait_until` or `timeouts.until` if there is none, counts work, or
scripts the clock. `ALLOWED` lists the exceptions and their reasons.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

LEAST_NET_S = 30.0
"""A limit below it is no net: a busy machine may take that long for anything."""

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "monotonic_ns", "perf_counter_ns", "time_ns"}
NETS = {"wait", "join", "result", "settimeout", "wait_for", "timeout", "run_until", "communicate"}
"""Calls whose last argument may be how long they wait."""

SLEEPS = re.compile(r"\bsleep\((?!0\)|\d{4,}\))")

MAY_DEPEND = re.compile(
    r"sleep|wait|timeout|deadline|run_until|monotonic|perf_counter|process_time|thread_time|time_ns|\btime\("
    r"|\b(?:join|result|communicate)\(\s*[\d.]"
)
"""A source without any of these has no fault."""

ALLOWED = {
    ("timeouts.py", "wait_until"): "what other threads and processes do is no event here; with a net",
    ("timeouts.py", "until"): "the same in an event loop",
    ("costs.py", "now"): "what a test costs is measured",
    ("api/test_media_fields.py", "test_the_time_to_load_counts_against_the_deadline.slow"): "time is what it spends",
    ("api/test_media_fields.py", "_hold_up.slow"): "time is what it spends, or for ever",
    ("api/test_streaming.py", "held"): "on the clock of the application's loop, which jumps over waits",
    ("serving/linked_fronts.py", "Link.follow"): "what the owner's process does again and again",
    ("bench/conftest.py", "FakeServer._stream"): "time is what a benchmark measures: never less than this",
    (
        "bench/test_bench_drive.py",
        "test_the_time_to_the_first_token_is_not_that_of_the_head",
    ): "the oracle of a measurement",
    ("servers/compile_double.py", "make_compile.source"): "in a process of its own, for a file",
    ("first_run/first_run.py", "main"): "a program, whose figures are times",
    ("first_run/first_run.py", "first_token"): "the same",
    ("grammar/real_schemas.py", "outcome"): "for figures that are printed by hand",
    ("servers/test_hostile_payloads.py", "traps"): "for a connection that must not come",
    (
        "ledgers/kernels/test_pool_processes.py",
        "test_no_call_is_lost_while_threads_fall_asleep",
    ): "any moment will do: it tries many",
    ("media/test_media_fetch.py", "test_a_host_that_sends_a_byte_at_a_time_gets_no_more_than_the_time_for_all.drip"): (
        "time is what it spends: it is over the limit however slow the machine is"
    ),
}
"""By file, and the functions around: why."""

SCRIPTED = (
    "loop_host.py",
    "wire.py",
    "api/test_http_messages.py",
    "api/test_http_time.py",
    "multi_model/",
    "serving/simulated_processes.py",
    "sim/",
)
"""Files and folders whose event loop has a clock of the tests' own: sleeping there takes no time."""


@dataclass(frozen=True)
class Fault:
    """`where`: the functions and classes around it, with dots."""

    where: str
    line: int
    what: str


def faults(source: str) -> list[Fault]:
    return list(_faults(ast.parse(source), "")) if MAY_DEPEND.search(source) else []


def _faults(node: ast.AST, where: str) -> Iterator[Fault]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}".strip(".")
        if not isinstance(node, ast.ClassDef):
            yield from (Fault(where, node.lineno, what) for what in _of_defaults(node.args))
    what = _of(node)
    if what:
        yield Fault(where, node.lineno, what)  # type: ignore[attr-defined]
    if not _is_net_or_past(node):
        for child in ast.iter_child_nodes(node):
            yield from _faults(child, where)


def _is_net_or_past(node: ast.AST) -> bool:
    """What comes of a clock: a moment that is far away, or has been."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call)):
        return False
    is_net = isinstance(node.op, ast.Add) and ast.unparse(node.right) == "PATIENCE_S"
    return is_net or (isinstance(node.op, ast.Sub) and _number(node.right) is not None)


def _of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and SLEEPS.search(node.value):
        return "sleeps in another process"
    return _of_call(node) if isinstance(node, ast.Call) else ""


def _of_call(call: ast.Call) -> str:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "sleep" and not (call.args and _is_at_once_or_for_ever(call.args[0])):
        return "sleeps"
    if name in CLOCKS or (name == "time" and _is_of_clock(call.func)):
        return "reads a clock"
    limits = [word.value for word in call.keywords if word.arg == "timeout"]
    limits += call.args[-1:] if name in NETS else []
    if any(_is_tight(limit) for limit in limits):
        return "waits no longer than a busy machine may take"
    if name == "settings" and any(word.arg == "deadline" and _number(word.value) for word in call.keywords):
        return "asserts a duration"
    return ""


def _is_of_clock(function: ast.expr) -> bool:
    module, _, _ = ast.unparse(function).rpartition(".")
    return module == "time" or module.removesuffix("()").endswith("loop")


def _of_defaults(arguments: ast.arguments) -> Iterator[str]:
    named = [*arguments.posonlyargs, *arguments.args]
    given = [*zip(named[len(named) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    given += [
        (name, default) for name, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
    ]
    for name, default in given:
        if "timeout" in name.arg and _is_tight(default):
            yield "waits no longer than a busy machine may take"


def _is_tight(limit: ast.expr) -> bool:
    seconds = _number(limit)
    return seconds is not None and 0 < seconds < LEAST_NET_S


def _number(node: ast.expr) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return None


def _is_at_once_or_for_ever(node: ast.expr) -> bool:
    seconds = _number(node)
    return seconds == 0 or (seconds or 0) >= 1000
