"""Reads the server's processes from /proc: which one listens, CPU time, memory. Starts servers."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

import msgspec

from tureen.bench.http import Address, BenchError, ClientConnection
from tureen.sandbox import child_process

TICKS = os.sysconf("SC_CLK_TCK")
LISTEN = "0A"
POLL_S = 0.01
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
MIB = 1 << 20


class ProcessMemory(msgspec.Struct, frozen=True):
    """MiB, summed over the processes. `private` counts a page shared by k processes as 1/k."""

    resident: float
    private: float
    peak: float


class Stat(msgspec.Struct, frozen=True):
    """The fields of /proc/PID/stat that are used."""

    parent: int
    cpu_s: float  # user and system time, with that of children that have ended


def listener(port: int) -> int | None:
    """Returns the process that listens on a TCP port here; of several, the one whose parent is not among them."""
    sockets = {
        fields[9]
        for table in ("tcp", "tcp6")
        for line in _read(Path("/proc/net") / table).splitlines()[1:]
        if (fields := line.split())[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port
    }
    names = {f"socket:[{inode}]" for inode in sockets}
    pids = {pid for pid in _all_pids() if names and names & _open_files(pid)}
    roots = [pid for pid in pids if (stat := read_stat(pid)) is None or stat.parent not in pids]
    return min(roots, default=None)


def family(root: int) -> list[int]:
    """Returns the process ids of `root` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        if (stat := read_stat(pid)) is not None:
            children.setdefault(stat.parent, []).append(pid)
    pids = [root]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def cpu_seconds(root: int | None) -> float | None:
    """Returns the CPU time of a process and its descendants so far; None when there is no such process."""
    stats = [read_stat(pid) for pid in family(root)] if root is not None else []
    return sum(stat.cpu_s for stat in stats if stat) if any(stats) else None


def memory(root: int | None) -> ProcessMemory | None:
    """Returns the memory of a process and its descendants; None when there is no such process."""
    if root is None or read_stat(root) is None:
        return None
    resident = private = peak = 0.0
    for pid in family(root):
        status = _kib_fields(Path(f"/proc/{pid}/status"))
        resident += status.get("VmRSS", 0) / 1024
        peak += status.get("VmHWM", 0) / 1024
        private += _kib_fields(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", 0) / 1024
    return ProcessMemory(round(resident, 1), round(private, 1), round(peak, 1))


def read_stat(pid: int) -> Stat | None:
    """Returns a process's figures; None when there is no such process."""
    text = _read(Path(f"/proc/{pid}/stat"))
    fields = text.rpartition(")")[2].split()  # the name before may contain anything
    return Stat(int(fields[1]), sum(map(int, fields[11:15])) / TICKS) if len(fields) > 15 else None


def _kib_fields(path: Path) -> dict[str, int]:
    fields = (line.split() for line in _read(path).splitlines())
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3 and field[2] == "kB"}


def _read(path: Path) -> str:
    """Returns the text of a /proc file; empty when the process has ended or is somebody else's."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _open_files(pid: int) -> set[str]:
    targets = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                targets.add(os.readlink(entry.path))
            except OSError:
                continue
    except OSError:
        return set()
    return targets


class StartedServer:
    """A server that this program started; its output is kept to be shown when it fails."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.started_s = time.perf_counter()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        try:
            self._process = child_process.start_command(
                shlex.split(command),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._output.close()
            raise BenchError(f"--start {command}: {error}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, address: Address) -> float:
        """Returns the seconds from the start until /health answered 200.

        Raises BenchError when the server ends before that.
        """
        while time.perf_counter() - self.started_s < START_TIMEOUT_S:
            if self._process.poll() is not None:
                raise BenchError(
                    f"--start {self.command}: ended with status {self._process.returncode} "
                    f"before it was ready:\n{self._last_lines()}"
                )
            connection = ClientConnection(address)
            try:
                status, _ = await connection.request("GET", "/health")
                if status == 200:
                    return time.perf_counter() - self.started_s
            except OSError:
                pass  # not listening yet
            finally:
                connection.close()
            await asyncio.sleep(POLL_S)
        raise BenchError(f"--start {self.command}: not ready after {START_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """Ends the server and all it started: SIGTERM, then SIGKILL."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, sign)
                self._process.wait(STOP_TIMEOUT_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._output.close()

    def _last_lines(self) -> str:
        self._output.seek(0)
        return "\n".join(self._output.read().decode("utf-8", "replace").splitlines()[-10:])
