"""The instruction sets of this processor, by the flags that the system lists, beside what the native kernels run on
it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec

SPELLED = {"avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni"}
"""Features as the files of instruction sets have them -> as /proc/cpuinfo has them, where that differs."""
CPUINFO = Path("/proc/cpuinfo")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class ProcessorFeatures(msgspec.Struct, frozen=True):
    """A processor's name, and the features that the system lists for it."""

    name: str
    flags: frozenset[str]

    def has(self, needs: str) -> bool:
        """Says whether the processor has these features; needs: their names, with spaces between."""
        return self.flags.issuperset(SPELLED.get(feature, feature) for feature in needs.split())


class Isa(msgspec.Struct, frozen=True):
    """An instruction set that the kernels were built for."""

    name: str
    runs: bool  # on this processor
    by_default: bool  # else only by its name


def parse_cpuinfo(text: str) -> ProcessorFeatures:
    """Returns the first processor that /proc/cpuinfo describes; text: that file's."""
    pairs = (line.partition(":") for line in text.strip().split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = fields.get("flags", fields.get("Features", ""))
    arm = f"implementer {fields.get('CPU implementer', '?')}, part {fields.get('CPU part', '?')}"
    return ProcessorFeatures(
        fields.get("model name", arm if "CPU part" in fields else "unknown"), frozenset(flags.split())
    )


def this_processor() -> ProcessorFeatures:
    """Returns the processor of this machine."""
    return parse_cpuinfo(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else "")


def better(processor: ProcessorFeatures, kernels: ModuleType) -> list[str]:
    """Returns a line for each instruction set that is better than the one in use, best first: why it is not, and what
    to do."""
    built = {isa.name: isa for isa in (Isa(*fields) for fields in kernels.isas())}
    lines = []
    for name, needs in kernels.needs_of_isas():
        if name == kernels.isa():
            break
        if processor.has(needs):
            lines.append(_why_not(name, built.get(name)))
    return lines


def _why_not(name: str, isa: Isa | None) -> str:
    if isa is None:
        return (
            f"{name} is missing: it was left out to build sooner, and make test builds it; or the compiler did not "
            "know it: make native with a newer one (GCC 11, Clang 12)"
        )
    if not isa.runs:
        return f"{name} is present, but the system disables it: that needs a newer kernel or hypervisor"
    if not isa.by_default:
        return f"{name} is present, but was never tested on such a processor: TUREEN_CPU_ISA={name} tries it"
    return f"{name} is present: TUREEN_CPU_ISA chose another"


def count_cores(cpus: Sequence[int], siblings: str = SIBLINGS) -> int | None:
    """Returns the number of cores that these CPUs belong to; None where the system does not say."""
    try:
        return len({Path(siblings.format(cpu)).read_text(encoding="utf-8") for cpu in cpus})
    except OSError:
        return None
