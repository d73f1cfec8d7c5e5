"""What this processor could run, by the flags that the system lists, beside what the native kernels run on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
NEON = ("asimddp", "asimdhp")
NEEDS = {
    "x86_64": {
        "amx": (*AVX512, "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"),
        "avx512vnni": (*AVX512, "avx512_vnni"),
        "avx512": AVX512,
        "avxvnni": (*AVX2, "avx_vnni"),
        "avx2": AVX2,
    },
    "aarch64": {"i8mm": (*NEON, "i8mm"), "neon": NEON},
}
"""Names of instruction sets, best first -> flags of /proc/cpuinfo."""
CPUINFO = Path("/proc/cpuinfo")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class Processor(msgspec.Struct, frozen=True):
    name: str
    machine: str  # as platform.machine() has it
    flags: frozenset[str]

    def could_run(self) -> list[str]:
        """Names of instruction sets, best first."""
        return [name for name, needs in NEEDS.get(self.machine, {}).items() if self.flags.issuperset(needs)]


class Isa(msgspec.Struct, frozen=True):
    """An instruction set that the kernels were built for."""

    name: str
    runs: bool  # on this processor
    by_default: bool  # else only by its name


def parse_cpuinfo(text: str, machine: str) -> Processor:
    """text: of /proc/cpuinfo, the first processor of which is described."""
    pairs = (line.partition(":") for line in text.strip().split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = fields.get("flags", fields.get("Features", ""))
    arm = f"implementer {fields.get('CPU implementer', '?')}, part {fields.get('CPU part', '?')}"
    return Processor(
        fields.get("model name", arm if "CPU part" in fields else "unknown"), machine, frozenset(flags.split())
    )


def this_processor() -> Processor:
    machine = os.uname().machine
    return parse_cpuinfo(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else "", machine)


def built(kernels: ModuleType) -> list[Isa]:
    """What the kernels were built for, best first."""
    return [Isa(*found) for found in kernels.isas()]


def better(processor: Processor, in_use: str, kernels: Iterable[Isa]) -> list[str]:
    """For each instruction set that is better than the one in use, best first: why it is not, and what to do."""
    names = processor.could_run()
    known = {isa.name: isa for isa in kernels}
    return [_why_not(name, known.get(name)) for name in names[: names.index(in_use) if in_use in names else None]]


def _why_not(name: str, isa: Isa | None) -> str:
    if isa is None:
        return f"{name} is missing: the compiler did not know it; make native with a newer one (GCC 11, Clang 12)"
    if not isa.runs:
        return f"{name} is there, but the system does not let programs use it: it wants a newer kernel or hypervisor"
    if not isa.by_default:
        return f"{name} is there, but never ran on such a processor: TUREEN_CPU_ISA={name} tries it"
    return f"{name} is there: TUREEN_CPU_ISA chose otherwise"


def count_cores(cpus: Sequence[int], siblings: str = SIBLINGS) -> int | None:
    """How many cores the system says that these CPUs belong to; None where it does not say."""
    try:
        return len({Path(siblings.format(cpu)).read_text(encoding="utf-8") for cpu in cpus})
    except OSError:
        return None
