"""No test depends on the machine's pace: what `slow_machine.py` finds, and that it finds it."""

from pathlib import Path

import httpx
import hypothesis
import pytest
import slow_machine
from timeouts import PATIENCE_S

TESTS = Path(__file__).parent
APART = ("clients",)
"""Folders of tests that are run by hand."""


def found():
    """(file, function): what depends on pace there."""
    places = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if not name.startswith((*APART, *slow_machine.SCRIPTED)) and path != Path(__file__):
            for fault in slow_machine.faults(path.read_text(encoding="utf-8")):
                places.setdefault((name, fault.where), []).append(f"tests/{name}:{fault.line} {fault.what}")
    return places


@pytest.fixture(scope="module")
def places():
    return found()


def test_no_test_sleeps_reads_a_clock_or_waits_too_short_a_time(places):
    assert [lines for place, lines in places.items() if place not in slow_machine.ALLOWED] == []


def test_each_exception_is_still_needed(places):
    assert {place for place in slow_machine.ALLOWED if (TESTS / place[0]).exists()} <= set(places)


SLEEPS = "sleeps"
READS = "reads a clock"
TIGHT = "waits no longer than a busy machine may take"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("time.sleep(0.1)", SLEEPS),
        ("async def f(): await asyncio.sleep(delay)", SLEEPS),
        ("from time import sleep\nsleep(3)", SLEEPS),
        ("run('import time; time.sleep(0.2)')", "sleeps in another process"),
        ("run(f'x = {x}; sleep({x})')", "sleeps in another process"),
        ("assert time.monotonic() < limit", READS),
        ("started = time.perf_counter()", READS),
        ("time.process_time()", READS),
        ("time.time()", READS),
        ("limit = time.monotonic() + 3", READS),
        ("assert time.monotonic() - started < 3", READS),
        ("asyncio.get_running_loop().time()", READS),
        ("loop.time()", READS),
        ("get(url, timeout=3)", TIGHT),
        ("event.wait(5)", TIGHT),
        ("thread.join(0.5)", TIGHT),
        ("await_(asyncio.wait_for(work, 10))", TIGHT),
        ("asyncio.timeout(3)", TIGHT),
        ("@pytest.mark.timeout(20)\ndef f(): pass", TIGHT),
        ("connection.settimeout(1)", TIGHT),
        ("def f(condition, timeout_s=3): pass", TIGHT),
        ("def f(*, timeout_s: float = 3): pass", TIGHT),
        ("@settings(deadline=200)\ndef f(): pass", "asserts a duration"),
    ],
)
def test_what_depends_on_pace_is_found(source, what):
    assert [fault.what for fault in slow_machine.faults(source)] == ([what] if what else [])


@pytest.mark.parametrize(
    "source",
    [
        "async def f(): await asyncio.sleep(0)",
        "time.sleep(1000)",
        "run('time.sleep(1000)')",
        "event.wait(PATIENCE_S)",
        "event.wait()",
        "get(url, timeout=120)",
        "', '.join(names)",
        "clock.now += 3",
        "receive(until_s=time.monotonic() + PATIENCE_S)",
        "receive(until_s=time.monotonic() - 1)",
        "def f(*, timeout_s: float = 300): pass",
        "@settings(deadline=None)\ndef f(): pass",
    ],
)
def test_what_does_not_is_not(source):
    assert slow_machine.faults(source) == []


def test_a_fault_says_where():
    source = "class A:\n    def b(self):\n        time.sleep(1)\n"
    assert slow_machine.faults(source) == [slow_machine.Fault("A.b", 3, SLEEPS)]


def test_no_property_of_hypothesis_has_a_deadline_and_no_request_of_httpx_five_seconds():
    assert hypothesis.settings().deadline is None
    assert httpx.Client().timeout == httpx.Timeout(PATIENCE_S)
