"""Reads `objdump`'s text of compiled kernels: functions, their innermost loops, what those loops keep in memory."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S.*?)(?:\s+[#;/].*)?$")
JUMP = re.compile(r"^(?:\{.*\} )?(?:j[a-z]+|b\.?[a-z]*|cbn?z|tbn?z)\s.*?\b([0-9a-f]+)(?: <|$)")
STACK = re.compile(r"\(%rsp|\[sp")
FRAME = re.compile(r"\(%rbp|\[x29")
SETS_FRAME = re.compile(r"^mov\s+(?:%rsp,%rbp|x29, sp)")
VECTOR = re.compile(r"%[xyz]mm\d|\b[qv]\d+\b")
SCALAR = re.compile(r"^v?(?:pbroadcast|broadcast|mov[dq] |movs[sd] )|\{1to")
"""What reads or writes a single number beside a vector."""


class Instruction(NamedTuple):
    address: int
    text: str


class Function(NamedTuple):
    name: str
    """Demangled."""
    code: list[Instruction]

    def loops(self, mnemonic):
        """Runs of instructions that a jump back to the first ends, with the mnemonic and without another such run."""
        runs = [(target, one.address) for one in self.code if (target := _target(one)) is not None]
        loops = [[one for one in self.code if first <= one.address <= last] for first, last in runs if first <= last]
        having = [loop for loop in loops if places(loop, mnemonic)]
        return [loop for loop in having if not any(set(other) < set(loop) for other in having)]

    def spills(self, part):
        """Instructions among these of its own that move a vector between a register and the stack."""
        has_frame = any(SETS_FRAME.match(one.text) for one in self.code)
        return [one.text for one in part if VECTOR.search(one.text) and _is_on_stack(one.text, has_frame)]


def functions(file, objdump="objdump"):
    """All of an object file."""
    command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", "--wide", str(file)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[Function] = []
    for line in listing.splitlines():
        if head := FUNCTION.match(line):
            found.append(Function(head[1], []))
        elif body := INSTRUCTION.match(line):
            found[-1].code.append(Instruction(int(body[1], 16), body[2]))
    return found


def places(code, mnemonic):
    """Where among these instructions the mnemonic is."""
    return [i for i, one in enumerate(code) if one.text.startswith(mnemonic)]


def _target(instruction):
    jump = JUMP.match(instruction.text)
    return int(jump[1], 16) if jump else None


def _is_on_stack(text, has_frame):
    if SCALAR.search(text):
        return False
    return bool(STACK.search(text) or (has_frame and FRAME.search(text)))
