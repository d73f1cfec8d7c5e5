"""Runs a command and shows how far it is: what pip fetches, and which of the kernels' files is compiled. Used by make.

    python tools/show_progress.py COMMAND …

On a terminal one line is written again and again; elsewhere each tenth step has a line. A failure shows the whole
output. Returns the command's exit status.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

COMPILED = re.compile(r"^\s*\[(\d+)/(\d+)\]")
FETCHED = re.compile(
    r"^\s*(Collecting|Downloading|Installing collected packages|Building editable|Building wheel)\b(.*)"
)
WIDTH = 78


def main(command: list[str]) -> int:
    begun, output, shown = time.monotonic(), list[str](), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            output.append(line)
            text = step(line)
            if text and text != shown:
                shown = text
                show(f"{time.monotonic() - begun:4.0f} s  {text}")
    if sys.stdout.isatty():
        print("\r" + " " * WIDTH, end="\r")
    if process.returncode:
        print(*output, sep="")
    return process.returncode


def step(line: str) -> str:
    """Returns what a line of output says of the progress; "" = nothing."""
    compiled, fetched = COMPILED.match(line), FETCHED.match(line)
    if compiled:
        done, total = map(int, compiled.groups())
        return f"compiling the kernels: {done} of {total}" if sys.stdout.isatty() or done % 10 == 0 else ""
    if fetched and (sys.stdout.isatty() or not fetched[1].startswith("Downloading")):
        return f"{fetched[1]}{fetched[2]}".split(" (from ")[0]
    return ""


def show(text: str) -> None:
    if sys.stdout.isatty():
        print("\r" + text[:WIDTH].ljust(WIDTH), end="", flush=True)
    else:
        print(text[:WIDTH], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
