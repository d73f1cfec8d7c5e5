"""Notes of the servers that run on this machine: one small file each, for `tureen ps` and `tureen stop`.

Imports: config, files; msgspec.
Imported by: bench, server.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from tureen.config import Config, cache_dir
from tureen.files import read_regular, replacing

POLL_SECONDS = 0.1


class RunningServer(msgspec.Struct, frozen=True):
    """A server as it described itself when it was ready."""

    pid: int
    birth: str  # tells the process from a later one with its number
    url: str
    model: str  # its name, as `tureen list` has it
    path: str
    since: float  # seconds since 1970
    drain_timeout_s: float


def folder(config: Config) -> Path:
    """Returns the folder of the notes: below XDG_RUNTIME_DIR where there is one, else in the cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime, "tureen") if os.path.isdir(runtime) else cache_dir(config) / "run"


class RunNote:
    """The note of this process's server."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path: Path | None = None

    def write(self, url: str, model: str, path: Path) -> None:
        """Says that the server answers at `url`. A folder that cannot be written is no fault."""
        pid = os.getpid()
        server = RunningServer(pid, _birth(pid), url, model, str(path), time.time(), self._config.drain_timeout_s)
        place = folder(self._config)
        with suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path = place / f"{pid}.json"
            with replacing(self._path) as file:
                file.write(msgspec.json.encode(server))

    def remove(self) -> None:
        """Removes the note, if there is one."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def running(config: Config) -> list[RunningServer]:
    """Returns the servers that run, the oldest first. Notes of processes that are gone are removed."""
    servers = []
    for path in folder(config).glob("[0-9]*.json"):
        try:
            server = msgspec.json.decode(read_regular(path), type=RunningServer)
        except (OSError, msgspec.MsgspecError):
            continue
        if is_alive(server):
            servers.append(server)
        elif server.birth.partition("@")[2] == _place():
            path.unlink(missing_ok=True)
    return sorted(servers, key=lambda server: server.since)


def is_alive(server: RunningServer) -> bool:
    """Says whether the server's own process runs, here."""
    return server.birth == _birth(server.pid)


def stop(server: RunningServer) -> None:
    """Asks a server to finish what runs and to end. Raises PermissionError where it is somebody else's."""
    with suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)


def wait(server: RunningServer, timeout_s: float) -> bool:
    """Waits for a server to end. Returns whether it ended in time."""
    end = time.monotonic() + timeout_s
    try:
        descriptor = os.pidfd_open(server.pid)  # type: ignore[attr-defined,unused-ignore] # Linux
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        while is_alive(server) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return not is_alive(server)
    try:
        if not is_alive(server):
            return True
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def _birth(pid: int) -> str:
    """Returns when a process began, in ticks, and where; "" for one that does not run."""
    try:
        status = read_regular(f"/proc/{pid}/stat").decode("utf-8", "replace")
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return "" if os.path.isdir("/proc/self") else f"?@{_place()}"
    fields = status.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{fields[19]}@{_place()}"


def _place() -> str:
    """Returns what tells this machine, since its last start, and this container from others that share the folder."""
    try:
        start = read_regular("/proc/sys/kernel/random/boot_id").decode().strip()
        return f"{start} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return os.uname().nodename
