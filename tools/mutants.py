"""Changes one operator or constant at a time and sees whether the tests notice: `make mutants ARGS='quotas 100'`.

The tests are collected once. Each mutant is a fork of that process, in which a changed function or constant has taken
the place of the original; it runs the tests that come through the changed line. Files stay as they are.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import coverage
import hypothesis
import pytest
from coverage_table import PARTS

GOAL = 90.0
NUM_MUTANTS = 30
"""A part, drawn with the part's name as the seed; another number may be asked for."""

CPU_S = 5.0
"""What a test of a mutant may use, and ten times what it used before."""

IDLE_S = 60.0
LEAST_SHARE = 0.01
"""Tests that use less of a processor for so long wait for what does not come."""

MORE_BYTES = 4 << 30
"""What a mutant may hold beside what this process has. A Java client of a test reserves more, and holds little."""

HOME = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
"""Lines `file | changed line | why nobody can tell the difference`."""

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A node that can be changed: its field, an index in that, the statement and the function it stands in."""

    node: ast.AST
    field: str
    index: int | None
    statement: ast.stmt
    function: ast.FunctionDef | ast.AsyncFunctionDef | None


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    path: str
    tree: ast.Module
    place: Place
    shown: str

    @property
    def line(self) -> int:
        return self.place.statement.lineno

    @property
    def lines(self) -> set[int]:
        """Where whoever runs what was changed comes through."""
        node = self.place.node
        first: int = getattr(node, "lineno", self.line)
        return {self.line, *range(first, (getattr(node, "end_lineno", None) or first) + 1)}


@dataclass
class Recorded:
    """What a test did without any change."""

    name: str
    seconds: float
    lines: dict[str, set[int]]


def places(tree: ast.Module) -> Iterator[Place]:
    """Everything that can be changed in the bodies of functions and in what modules are assigned."""
    for top in tree.body:
        if isinstance(top, ast.ClassDef):
            for method in top.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _places_in(method.body, method)
        elif isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _places_in(top.body, top)
        elif isinstance(top, ast.Assign):
            yield from _places_in([top], None)


def _places_in(
    body: Sequence[ast.AST], function: ast.FunctionDef | ast.AsyncFunctionDef | None, statement: ast.stmt | None = None
) -> Iterator[Place]:
    for node in body:
        around = node if isinstance(node, ast.stmt) else statement
        if around is None:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield Place(node, "ops", 0, around, function)
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
            yield Place(node, "op", None, around, function)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield Place(node, "value", None, around, function)
        yield from _places_in(list(ast.iter_child_nodes(node)), function, around)


def mutants_of(path: str) -> list[Mutant]:
    """Every mutant of a file."""
    text = (HOME / path).read_text()
    return [_mutant(path, ast.parse(text), number) for number in range(len(list(places(ast.parse(text)))))]


def _mutant(path: str, tree: ast.Module, number: int) -> Mutant:
    place = list(places(tree))[number]
    node, field, index = place.node, place.field, place.index
    if isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1
    elif index is None:
        setattr(node, field, SWAPS[type(getattr(node, field))]())
    else:
        getattr(node, field)[index] = SWAPS[type(getattr(node, field)[index])]()
    return Mutant(path, tree, place, ast.unparse(place.statement).splitlines()[0])


def put_in_place(mutant: Mutant) -> None:
    """From now on this process runs the changed module."""
    if mutant.place.function is None:
        _assign_again(mutant)
        return
    first = min(node.lineno for node in (mutant.place.function, *mutant.place.function.decorator_list))
    path = str(HOME / mutant.path)
    changed = next(
        code
        for code in _codes_in(compile(mutant.tree, path, "exec"))
        if (code.co_name, code.co_firstlineno) == (mutant.place.function.name, first)
    )
    gc.unfreeze()
    originals = [
        function
        for function in gc.get_objects()
        if isinstance(function, FunctionType)
        and function.__code__.co_filename == path
        and (function.__code__.co_qualname, function.__code__.co_firstlineno) == (changed.co_qualname, first)
    ]
    if not originals:
        raise LookupError(f"{path}:{first} is nowhere in memory")
    for original in originals:
        original.__code__ = changed


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _assign_again(mutant: Mutant) -> None:
    """The changed assignment, those after it that use its name, and the names of both in whoever imported them."""
    module = next(m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(HOME / mutant.path))
    stale: set[str] = set()
    for statement in mutant.tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        used = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
        if statement is not mutant.place.statement and not used & stale:
            continue
        names = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        before = {name: getattr(module, name) for name in names}
        exec(compile(ast.Module([statement], []), mutant.path, "exec"), vars(module))  # noqa: S102 - our own source
        stale |= names
        for other in list(sys.modules.values()):
            for name, value in before.items():
                if vars(other).get(name) is value:
                    setattr(other, name, getattr(module, name))


class Mutation:
    """A pytest plug-in that tries mutants instead of running the tests."""

    def __init__(self, names: Sequence[str], num_mutants: int) -> None:
        self.totals = [0, 0]
        self.is_broken = False
        self._out = sys.stdout
        self._names = names
        self._num_mutants = num_mutants
        self._equivalent = [
            tuple(part.strip() for part in line.split(" | "))[:2] for line in EQUIVALENT.read_text().splitlines()
        ]

    def pytest_collection(self) -> None:
        """Once conftest.py has chosen a profile: what fails need not be made small, and is not kept."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", hypothesis.settings(), database=None, phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("not all tests can be collected")
        for name in self._names:
            self._try_part(session, name)
        return True

    def _try_part(self, session: pytest.Session, name: str) -> None:
        files, tests = PARTS[name]
        paths = [f"tureen/{path}" for path in files]
        items = [item for item in session.items if any(item.path.is_relative_to(HOME / test) for test in tests)]
        recorded = record(session, items, paths)
        if recorded is None:
            self._print(f"{name}: its tests fail without any change")
            self.is_broken = True
            return
        every = [mutant for path in paths for mutant in mutants_of(path)]
        drawn = random.Random(name).sample(every, min(self._num_mutants, len(every)))
        chosen = [mutant for mutant in drawn if (mutant.path, mutant.shown) not in self._equivalent]
        num_killed = num_stuck = 0
        for mutant in chosen:
            fate = self._try_mutant(session, mutant, recorded, items)
            num_killed += fate != "survived"
            num_stuck += fate == "stuck"
            if fate == "survived":
                self._print(f"    survived: {mutant.path}:{mutant.line} | {mutant.shown}")
        self.totals = [self.totals[0] + num_killed, self.totals[1] + len(chosen)]
        self._print(
            f"{name:14} {num_killed} / {len(chosen)} killed, {num_stuck} of these ran or waited without end; "
            f"{len(drawn)} of {len(every)} drawn with the seed {name!r}, {len(drawn) - len(chosen)} of them equivalent"
        )

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _try_mutant(
        self, session: pytest.Session, mutant: Mutant, recorded: list[Recorded], items: list[pytest.Item]
    ) -> str:
        is_constant = mutant.place.function is None
        coming = [
            test
            for test in recorded
            if (is_constant and test.lines.get(mutant.path)) or mutant.lines & test.lines.get(mutant.path, set())
        ]
        by_name = {item.nodeid: item for item in items}
        seconds = {test.name: test.seconds for test in coming}
        chosen = [by_name[test.name] for test in _soonest(coming)]

        def work() -> bool:
            put_in_place(mutant)
            for item, later in _pairs(chosen):
                limit_s = int(time.process_time() + CPU_S + 10 * seconds[item.nodeid]) + 1
                resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
                if not _passes(session, item, later):
                    return False
            return True

        return forked(work)


def _soonest(tests: list[Recorded]) -> list[Recorded]:
    """The quickest of each test function, then the others."""
    first: dict[str, Recorded] = {}
    ranked = sorted(tests, key=lambda test: test.seconds)
    for test in ranked:
        first.setdefault(test.name.partition("[")[0], test)
    return [*first.values(), *(test for test in ranked if test is not first[test.name.partition("[")[0]])]


def _pairs(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


def _passes(session: pytest.Session, item: pytest.Item, later: pytest.Item | None) -> bool:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=later)
    return not session.testsfailed


def record(session: pytest.Session, items: list[pytest.Item], paths: list[str]) -> list[Recorded] | None:
    """What each test runs of the files; None when a test fails."""
    with tempfile.NamedTemporaryFile() as report:

        def work() -> bool:
            cover = coverage.Coverage(data_file=None, include=[str(HOME / path) for path in paths], config_file=False)
            seconds: dict[str, float] = {}
            cover.start()
            for item, later in _pairs(items):
                started_s = time.process_time()
                cover.switch_context(item.nodeid)
                if not _passes(session, item, later):
                    return False
                seconds[item.nodeid] = time.process_time() - started_s
            cover.stop()
            data = cover.get_data()
            lines: dict[str, dict[str, list[int]]] = {name: {} for name in seconds}
            for path in paths:
                for line, contexts in data.contexts_by_lineno(str(HOME / path)).items():
                    for name in contexts:
                        lines[name].setdefault(path, []).append(line)
            Path(report.name).write_text(json.dumps([(name, seconds[name], lines[name]) for name in seconds]))
            return True

        if forked(work) != "survived":
            return None
        entries = json.loads(Path(report.name).read_text())
    return [Recorded(name, s, {path: set(some) for path, some in lines.items()}) for name, s, lines in entries]


def forked(work: Callable[[], bool]) -> str:
    """Whether what runs in a fork of this process `survived`, is `killed`, or `stuck` and killed therefore."""
    process = os.fork()
    if process == 0:
        _work_apart(work)
    waiting = os.pidfd_open(process)
    used, is_stuck = -1.0, False
    while not select.select([waiting], [], [], IDLE_S)[0]:
        now = _cpu_s(process)
        is_stuck = now - used < LEAST_SHARE * IDLE_S
        if is_stuck:
            break
        used = now
    os.close(waiting)
    if is_stuck:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if is_stuck or os.WIFSIGNALED(status):
        return "stuck"
    return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"


def _work_apart(work: Callable[[], bool]) -> None:
    """Never returns."""
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (size + MORE_BYTES, resource.RLIM_INFINITY))
        status = int(not work())
    finally:
        os._exit(status)


def _cpu_s(process: int) -> float:
    """What it has used, its children that ended too."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main(args: list[str]) -> int:
    """Prints killed / tried of each part. Exit status 1 where all together are below the goal."""
    numbers = [int(arg) for arg in args if arg.isdigit()]
    names = [arg for arg in args if not arg.isdigit()] or list(PARTS)
    tests = sorted({test for name in names for test in PARTS[name][1]})
    mutation = Mutation(names, numbers[0] if numbers else NUM_MUTANTS)
    options = ["-p", "no:cacheprovider", "-s", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main([*options, *tests], plugins=[mutation])
    if status != pytest.ExitCode.OK:
        print(said.getvalue())
    killed, tried = mutation.totals
    print(f"{'all':14} {killed} / {tried}")
    is_low = 100 * killed < GOAL * tried
    return int(is_low or mutation.is_broken or status != pytest.ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
