"""Runs `tureen check`: versions, the processor, and the speed that it allows. Names no user, host or path."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from types import ModuleType

import msgspec

from tureen import __version__
from tureen.bench import limits, processor
from tureen.bench.limits import Allowed, Measured
from tureen.devices import cpu
from tureen.devices.base import resolve_device
from tureen.kernels.cpu import native

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "starlette", "uvicorn", "msgspec", "transformers")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    processor: str
    cpus_usable: int
    cpus: int
    cores: int | None  # of those usable, as the system has it
    threads: int  # that an engine takes by default
    isa: str | None  # instruction set in use; None: no native kernels
    fault: str  # why there are none
    better: list[str]  # instruction sets that could be had, and how
    measured: list[Measured]
    allowed: Allowed | None  # for the default model


class Report(msgspec.Struct, frozen=True, kw_only=True):
    tureen: str
    python: str
    system: str
    packages: dict[str, str | None]
    machine: Machine
    device: str
    free_gib: float


def make_report() -> Report:
    """Makes the report; measures for some tenths of a second."""
    device = resolve_device("auto")
    return Report(
        tureen=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in PACKAGES},
        machine=_machine(),
        device=device.name,
        free_gib=round(device.free_bytes() / 2**30, 1),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> Machine:
    kernels, fault = _kernels()
    here = processor.this_processor()
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    threads = cpu.num_threads()
    measured = limits.measure(kernels, threads) if kernels else []
    return Machine(
        processor=here.name,
        cpus_usable=len(usable),
        cpus=os.cpu_count() or len(usable),
        cores=processor.count_cores(usable),
        threads=threads,
        isa=kernels.isa() if kernels else None,
        fault=fault,
        better=processor.better(here, kernels) if kernels else [],
        measured=measured,
        allowed=limits.allowed(limits.DEFAULT_WORK, measured) if measured else None,
    )


def _kernels() -> tuple[ModuleType | None, str]:
    """Returns the native kernels, or why they cannot be used."""
    try:
        kernels = native.load()
    except (ImportError, RuntimeError) as error:
        return None, str(error)
    return kernels, "" if kernels else native.MISSING


def lines_of(report: Report) -> list[str]:
    """Returns the report as lines for people."""
    return [f"{name:<13}{value}" for name, value in rows_of(report)]


def rows_of(report: Report) -> list[tuple[str, str]]:
    """Returns the report as names of facts and facts; a fact that belongs to the one before has no name."""
    machine = report.machine
    pairs = [("tureen", report.tureen), ("python", f"{report.python} on {report.system}")]
    pairs += [(name, version or "not installed") for name, version in report.packages.items()]
    pairs += [("device", f"{report.device}, {report.free_gib} GiB free"), ("processor", machine.processor)]
    pairs.append(("cpus", _cpus(machine)))
    first, *others = _instruction_sets(machine)
    pairs += [("kernels", first), *(("", line) for line in others)]
    pairs += _measured(machine.measured)
    if machine.allowed is not None:
        pairs += _allowed(machine.allowed)
    return pairs


def _cpus(machine: Machine) -> str:
    text = f"{machine.cpus_usable} usable of {machine.cpus}, {machine.threads} threads by default"
    return text if machine.cores is None else f"{text}; the system says {machine.cores} core{'s' * (machine.cores > 1)}"


def _instruction_sets(machine: Machine) -> list[str]:
    if machine.isa is None:
        return [machine.fault]
    return [machine.isa + ("" if machine.better else ", the best for this processor"), *machine.better]


def _measured(measured: list[Measured]) -> list[tuple[str, str]]:
    if not measured:
        return []
    single, most = measured[0], measured[-1]
    reads, products = f"{most.read_gb_s:.1f} GB/s", f"{most.int8_gops:.0f} GOPS"
    if most.threads > 1:
        reads += f" with {most.threads} threads, {limits.scaling(single.read_gb_s, most.read_gb_s)}"
        products += f" with {most.threads} threads, {limits.scaling(single.int8_gops, most.int8_gops)}"
    rows = [("reads", reads), ("int8", products)]
    if limits.is_like_one_core(measured):
        rows.append(("", "more threads help little: these CPUs share a core, or other programs use them"))
    return rows


def _allowed(allowed: Allowed) -> list[tuple[str, str]]:
    """Returns the speeds that the default model cannot exceed."""
    work = limits.DEFAULT_WORK
    size = work.bytes_per_token(limits.CONTEXT) / (1 << 20)
    rows = [("limits", f"of {work.model} here, if nothing but this took time:")]
    reads = f"a token reads {size:.0f} MiB, weights and the cache of {limits.CONTEXT} tokens"
    rows.append(("", f"{allowed.single:,.0f} tok/s for one stream: {reads}"))
    operations = f"a token takes {work.operations_per_token(limits.PROMPT) / 1e6:.0f} million operations"
    rows.append(("", f"{allowed.prefill:,.0f} tok/s of a prompt of {limits.PROMPT} tokens: {operations}"))
    return rows
