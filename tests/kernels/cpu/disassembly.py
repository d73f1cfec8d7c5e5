"""Reads `objdump`'s text of compiled kernels: functions, their innermost loops, what those loops keep in memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S.*?)(?:\s+[#;/].*)?$")
JUMP = re.compile(r"^(?:\{.*\} )?(?:j[a-z]+|b\.?[a-z]*|cbn?z|tbn?z)\s.*?\b([0-9a-f]+)(?: <|$)")
STACK = re.compile(r"\(%r[sb]p|\[(?:sp|x29)")
VECTOR = re.compile(r"%[xyz]mm\d|\b[qv]\d+\b")


class Instruction(NamedTuple):
    address: int
    text: str


def functions(file: Path, objdump: str = "objdump") -> dict[str, list[Instruction]]:
    """Demangled name -> its instructions."""
    command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", "--wide", str(file)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in listing.splitlines():
        if head := FUNCTION.match(line):
            current = found.setdefault(head[1], [])
        elif body := INSTRUCTION.match(line):
            current.append(Instruction(int(body[1], 16), body[2]))
    return found


def smallest_loops(code: list[Instruction], mnemonic: str) -> Iterator[list[Instruction]]:
    """Runs of instructions that end with a jump back to their first, have the mnemonic, and hold no other such run."""
    loops = [
        [instruction for instruction in code if target <= instruction.address <= jump.address]
        for jump in code
        if (target := _target(jump)) is not None and target <= jump.address
    ]
    having = [loop for loop in loops if any(instruction.text.startswith(mnemonic) for instruction in loop)]
    for loop in having:
        if not any(other is not loop and set(other) < set(loop) for other in having):
            yield loop


def _target(instruction: Instruction) -> int | None:
    jump = JUMP.match(instruction.text)
    return int(jump[1], 16) if jump else None


def spills(loop: list[Instruction]) -> list[str]:
    """Instructions that move a vector between a register and the stack."""
    return [one.text for one in loop if STACK.search(one.text) and VECTOR.search(one.text)]
