"""Runs the workload `start`: servers started in turn, each alone; measures how long until each answers, and what it
took."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

import tureen
from tureen.bench.backends import BACKENDS
from tureen.bench.drive import ask
from tureen.bench.http import Address, BenchError, ClientConnection
from tureen.bench.process import StartedServer, cpu_seconds, family, listener
from tureen.bench.report import in_short, lay_out, ttft
from tureen.bench.session import WARM_UP, BenchPlan, TargetSpec
from tureen.bench.workloads import BenchRequest, Dice
from tureen.files import open_regular
from tureen.server import fastest_event_loop

DROP = Path("/proc/sys/vm/drop_caches")
MIB = 1 << 20

Say = Callable[[str], None]


class Start(msgspec.Struct, kw_only=True):
    """The figures of one start. Seconds count from the command on, the moment between ready and first request left
    out."""

    target: str
    round: int
    ready_s: float
    first_token_s: float
    cpu_s: float | None  # of all its processes, until it was ready
    read_mib: float  # that its living processes had the system fetch from disk until then


def run_starts(plan: BenchPlan, cold: str | None, say: Say) -> list[Start]:
    """Starts every target's command in turn, `plan.rounds` times, after a first time that does not count.

    cold: "evict" takes what the servers read out of the page cache before each start, "drop" takes all that is there.
    Raises BenchError.
    """
    for spec in plan.targets:
        if spec.start is None:
            raise BenchError(f"--workload start: {spec.name} needs --start with its command")
    with asyncio.Runner(loop_factory=fastest_event_loop()) as runner:
        try:
            return runner.run(_Starts(plan, cold, say).run())
        except asyncio.CancelledError:
            raise BenchError("ended by SIGTERM; nothing was written") from None


class _Starts:
    def __init__(self, plan: BenchPlan, cold: str | None, say: Say) -> None:
        self._plan = plan
        self._cold = cold
        self._say = say
        self._files: set[Path] = set()  # that the servers read
        self._seed = secrets.randbits(32) if plan.seed is None else plan.seed

    async def run(self) -> list[Start]:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        for spec in self._plan.targets:
            await self._start(spec, -1)
        if self._cold == "evict":
            self._files.update(_files_below(_own_folders()))
        starts = []
        for number in range(self._plan.rounds):
            for spec in self._plan.targets:
                self._cool()
                starts.append(await self._start(spec, number))
                self._say(
                    f"{spec.name}: ready after {starts[-1].ready_s:.2f} s, first token {starts[-1].first_token_s:.2f} s"
                )
        return starts

    async def _start(self, spec: TargetSpec, number: int) -> Start:
        address = Address(spec.url, api_key=self._plan.api_key)
        if listener(address.port) is not None:
            raise BenchError(f"--start for {spec.name}: something listens on {spec.url} already")
        server = StartedServer(spec.start or "")
        try:
            ready_s = await server.ready(address)
            cpu_s, read_mib = cpu_seconds(server.pid), _read_bytes(server.pid) / MIB
            if number < 0:
                self._files |= _mapped_files(server.pid)
            first_s = await self._first_token(spec, address, number)
        except OSError as error:
            raise BenchError(f"{spec.url}: {error}") from None
        finally:
            server.stop()
        return Start(
            target=spec.name,
            round=number,
            ready_s=round(ready_s, 3),
            first_token_s=round(ready_s + first_s, 3),
            cpu_s=None if cpu_s is None else round(cpu_s, 2),
            read_mib=round(read_mib, 1),
        )

    async def _first_token(self, spec: TargetSpec, address: Address, number: int) -> float:
        connection, backend = ClientConnection(address), BACKENDS[spec.backend]()
        try:
            vocab_size = await backend.prepare(connection)
            vocab_size = self._plan.vocab_size or vocab_size
            if vocab_size is None:
                raise BenchError(f"{spec.url} does not report its vocabulary size: give --vocab N")
            dice = Dice(vocab_size, self._seed, "start", spec.name, number)
            return ttft(await ask(connection, backend, BenchRequest(dice.token_ids(WARM_UP.prompt_len), 1)))
        finally:
            connection.close()

    def _cool(self) -> None:
        """Raises BenchError."""
        if self._cold is None:
            return
        os.sync()  # what is not written yet stays
        if self._cold == "evict":
            for file in self._files:
                evict(file)
            return
        try:
            DROP.write_text("3")
        except OSError as error:
            raise BenchError(f"--cold drop: {DROP}: {error.strerror}; use --cold evict") from None


def evict(file: Path) -> None:
    """Takes a file's pages out of the page cache, but those that a running process has mapped."""
    with contextlib.suppress(OSError), open_regular(file) as opened:  # else gone, not ours to read, or no file
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _own_folders() -> list[Path]:
    """Returns the folders of this Python, its packages and tureen: a server in Python maps little of what it reads."""
    paths = sysconfig.get_paths()
    return [Path(sys.prefix), Path(paths["stdlib"]), Path(tureen.__file__).parent]


def _files_below(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for root, _, names in os.walk(folder):
            yield from (Path(root, name) for name in names)


def _mapped_files(root: int) -> set[Path]:
    """Returns the files that the processes have mapped: programs, libraries, models."""
    paths = set()
    for pid in family(root):
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                path = line.partition("/")[2]
                if path and not path.startswith(("dev/", "memfd:")):
                    paths.add(Path("/" + path))
    return paths


def _read_bytes(root: int) -> int:
    """Returns the bytes read from the disk so far."""
    total = 0
    for pid in family(root):
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
                total += int(line.removeprefix("read_bytes:")) if line.startswith("read_bytes:") else 0
    return total


def table(starts: Sequence[Start]) -> str:
    """Formats the median of each figure, with the least and the most of the times; and the first target's over the
    others'."""
    lines: list[tuple[str, ...]] = [("start", "", "ready s", "least", "most", "first token s", "cpu s", "MiB read")]
    medians: dict[str, float] = {}
    for target in dict.fromkeys(start.target for start in starts):
        mine = [start for start in starts if start.target == target]
        ready = [start.ready_s for start in mine]
        cpu = [start.cpu_s for start in mine if start.cpu_s is not None]
        medians[target] = statistics.median(start.first_token_s for start in mine)
        figures = (statistics.median(ready), min(ready), max(ready), medians[target])
        more = (statistics.median(cpu) if cpu else None, statistics.median(start.read_mib for start in mine))
        lines.append((target, "", *(in_short(value) for value in (*figures, *more))))
    first, *others = medians
    ratios = [f"first token {first}/{other}: {medians[first] / medians[other]:.2f}x" for other in others]
    return "\n".join([lay_out(lines), *ratios])
