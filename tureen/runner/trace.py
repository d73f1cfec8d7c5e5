"""Records steps as they run, for Chrome's trace viewer or ui.perfetto.dev (the "Trace Event Format", JSON Array). No
torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, Protocol

from tureen.contract.runner import Batch
from tureen.errors import Conflict, Forbidden, InvalidRequest, RequestFailed, echo
from tureen.log import get_logger

MAX_STEPS = 10_000
"""Number of steps after which a trace ends by itself."""

MAX_NAME_CHARS = 1024
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

log = get_logger("runner")


class TraceOptions(NamedTuple):
    """The things that a trace records beside the steps; none of them unless a client asks."""

    activities: tuple[str, ...] = ()  # CPU, GPU; none: what there is
    with_stack: bool = False
    record_shapes: bool = False


class Trace(Protocol):
    """A recording of steps. One thread calls all of it."""

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Records what runs inside the context."""

    def write(self, file: BinaryIO) -> None:
        """Ends the recording and writes it. Raises OSError."""


class StepTrace:
    """A Trace of how long each step took, and how many rows and tokens it had."""

    def __init__(self, options: TraceOptions, native_s: Callable[[], float]) -> None:
        """native_s: returns the seconds spent in native code so far. Raises InvalidRequest for what only torch can
        record."""
        if "GPU" in options.activities:
            raise no_gpu()
        for name, is_set in (("with_stack", options.with_stack), ("record_shapes", options.record_shapes)):
            if is_set:
                raise InvalidRequest(
                    f"{name} true: the native kernels have no torch operations to record; leave it out, or start "
                    "the server with --kernels torch",
                    field=name,
                )
        self._native_s = native_s
        self._events: list[dict[str, object]] = []

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        start, native = time.perf_counter(), self._native_s()
        try:
            yield
        finally:
            seconds, native = time.perf_counter() - start, self._native_s() - native
            facts = describe(batch)
            self._add("step", start, seconds, facts)
            self._add("forward pass", start, native, {"tokens": facts["tokens"]})

    def write(self, file: BinaryIO) -> None:
        file.write(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}).encode())

    def _add(self, name: str, start_s: float, seconds: float, facts: dict[str, int]) -> None:
        """Adds a complete event; its times are in microseconds."""
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": os.getpid(),
                "tid": 0,
                "ts": start_s * 1e6,
                "dur": seconds * 1e6,
                "args": facts,
            }
        )


class Profiler:
    """The trace that is being recorded, if there is one, and the file that it goes to."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._file: BinaryIO | None = None
        self._name = ""
        self._steps_left = 0

    def start(
        self, make_trace: Callable[[], Trace], *, root: str, folder: str, prefix: str, num_steps: int | None
    ) -> str:
        """Begins a trace. Returns the path where it will be, below `root`.

        num_steps: it ends by itself after these. Raises Conflict, InvalidRequest, Forbidden.
        """
        if self.trace is not None:
            raise Conflict("a profile is already being recorded; end it with /stop_profile", code="profile_running")
        name = f"{prefix}{'-' if prefix else ''}{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}.trace.json"
        path = _relative(Path(root), folder) / name
        with ExitStack() as undo:
            self._file = undo.enter_context(open_below(Path(root), folder, name))
            undo.callback((Path(root) / path).unlink, missing_ok=True)
            self.trace = make_trace()  # it may record from now on: nothing can fail behind it
            undo.pop_all()
        self._name = str(path)
        self._steps_left = num_steps or MAX_STEPS
        return self._name

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Records one step of the trace, if there is one; the last step ends it."""
        assert self.trace is not None
        try:
            with self.trace.step(batch):
                yield
        finally:
            self._steps_left -= 1
            if self._steps_left == 0:
                with suppress(RequestFailed):  # it is in the log
                    self.stop()

    def stop(self) -> str:
        """Ends the trace. Returns its path. Raises Conflict when there is none, RequestFailed when it cannot be
        written."""
        if self.trace is None or self._file is None:
            raise Conflict(
                "no profile is being recorded; start one with /start_profile, note that num_steps ends it by itself",
                code="no_profile",
            )
        trace, file = self.trace, self._file
        self.trace = self._file = None
        try:
            with file:
                trace.write(file)
        except OSError as error:
            log.error("the profile %s could not be written: %s", self._name, error.strerror)
            raise RequestFailed("the profile could not be written; the server's log says why") from None
        log.info("profile written: %s", self._name)
        return self._name


def no_gpu() -> InvalidRequest:
    """Returns the error for a trace of a GPU where there is none."""
    return InvalidRequest(
        "activities: 'GPU' cannot be recorded, the model runs on a CPU; ask for 'CPU'", field="activities"
    )


def describe(batch: Batch) -> dict[str, int]:
    """Describes a step in numbers, for its event in the trace."""
    return {
        "rows": len(batch.rows),
        "tokens": sum(len(row.token_ids) for row in batch.rows),
        "sampled": sum(row.sample for row in batch.rows),
        "admitted": len(batch.new_slots),
    }


def open_below(root: Path, folder: str, name: str) -> BinaryIO:
    """Opens a new file for writing in a folder below `root`, which is made where it is not there.

    No symbolic link is followed below the root. Raises InvalidRequest for a folder elsewhere, Forbidden where nothing
    can be written.
    """
    parts = _relative(root, folder).parts
    opened: list[int] = []
    try:
        opened.append(os.open(root, OPEN_FOLDER & ~os.O_NOFOLLOW))
        for part in parts:
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=opened[-1])
            opened.append(os.open(part, OPEN_FOLDER, dir_fd=opened[-1]))
        return open(os.open(name, OPEN_FILE, 0o644, dir_fd=opened[-1]), "wb")
    except OSError as error:
        log.warning("no profile in %s: %s", root, error)
        raise Forbidden(
            f"output_dir {echo(folder)}: it is not writable; the server's log says why", field="output_dir"
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _relative(root: Path, folder: str) -> PurePosixPath:
    """Returns the folder below the root, named from there or absolute. Raises InvalidRequest."""
    path = PurePosixPath(folder)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    if path.is_absolute() or ".." in path.parts or len(folder) > MAX_NAME_CHARS or "\0" in folder:
        raise InvalidRequest(
            f"output_dir {echo(folder)}: must be a path relative to the server's --profile-dir",
            field="output_dir",
        )
    return path
