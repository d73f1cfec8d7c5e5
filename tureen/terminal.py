"""Shows the operator the progress of start-up and the ready banner.

Imports: contract, log; rich.
Imported by: server.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from tureen.contract.types import EngineInfo
from tureen.log import BYTES

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

EMBEDDING_EXAMPLE = '{"input": ["A cat sleeps on the sofa.", "A kitten naps on the couch."]}'
EXAMPLE = '{"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}'


PLAIN_SECONDS = 10.0
"""Seconds between two lines about a download where there is no terminal."""


class PhaseDisplay:
    """A `Progress` that shows bars on a terminal, plain lines otherwise. A context manager.

    A phase that ends with BYTES has sizes, their rate and the time left. Without a terminal it gets a line when it
    begins, each PLAIN_SECONDS and at its end; others get one at their end, those of unknown length one when they begin.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard error, if none is given."""
        self._stream = stream = stream or sys.stderr
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._transfers: dict[str, Transfer] = {}
        if stream.isatty():
            self._bars = _bars(stream)

    def __enter__(self) -> PhaseDisplay:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._bars is not None:
            if phase not in self._tasks:
                name = phase.removesuffix(BYTES)
                self._tasks[phase] = self._bars.add_task(name, total=total or None, completed=done, phase=phase)
            self._bars.update(self._tasks[phase], completed=done, total=total or None)
        elif phase.endswith(BYTES):
            transfer = self._transfers.setdefault(phase, Transfer(phase.removesuffix(BYTES), done))
            self._print(transfer.line(done, total))
        else:
            self._print(self._plain_line(phase, done, total))

    def _plain_line(self, phase: str, done: int, total: int) -> str:
        """Returns what there is to say of a phase that is not in bytes; "" for nothing."""
        is_new = phase not in self._started
        started = self._started.setdefault(phase, time.monotonic())
        if total and done >= total and started >= 0:
            self._started[phase] = -1.0
            return f"{phase}: {time.monotonic() - started:.2f} s"
        return f"{phase} …" if is_new and not total else ""

    def _print(self, line: str) -> None:
        if line:
            print(line, file=self._stream, flush=True)


class Transfer:
    """The lines about one download, or anything else that is counted in bytes."""

    def __init__(self, name: str, first: int) -> None:
        """first: the bytes that were there before."""
        self._name = name
        self._first = first
        self._began = self._told = time.monotonic()
        self._state = "new"

    def line(self, done: int, total: int) -> str:
        """Returns what is to be told now; "" for nothing."""
        now = time.monotonic()
        rate = (done - self._first) / (now - self._began) if now > self._began else 0.0
        if total and done >= total:
            was, self._state = self._state, "over"
            told = f"{self._name}: {total / 1e6:,.1f} MB in {now - self._began:.1f} s"
            return "" if was == "over" else f"{told} ({rate / 1e6:,.1f} MB/s)" if rate else told
        if self._state == "new":
            self._state = "running"
            return f"{self._name}: {'goes on at ' if done else ''}{_share(done, total)}"
        if now - self._told < PLAIN_SECONDS:
            return ""
        self._told = now
        left = f", {(total - done) / rate:.0f} s left" if rate and total else ""
        return f"{self._name}: {_share(done, total)}, {rate / 1e6:,.1f} MB/s{left}"


def _share(done: int, total: int) -> str:
    return f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB" if total else f"{done / 1e6:,.1f} MB"


def _bars(stream: TextIO) -> Bars:
    from rich import progress  # noqa: PLC0415 - for terminals; what runs unattended does without
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Column  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class Amount(progress.ProgressColumn):
        """Counts, or bytes with their rate and the time left."""

        of_bytes = (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
        of_others = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())

        def render(self, task: progress.Task) -> Text:
            columns = self.of_bytes if task.fields["phase"].endswith(BYTES) else self.of_others
            shown = Text(" ").join(column.render(task) for column in columns)
            return shown.append(" left") if columns is self.of_bytes else shown

    return progress.Progress(
        progress.SpinnerColumn(finished_text="✓"),
        progress.TextColumn("{task.description:<20}", table_column=Column(no_wrap=True)),
        progress.BarColumn(bar_width=16),
        Amount(table_column=Column(no_wrap=True)),
        console=Console(file=stream),
        transient=True,
    )


def banner(info: EngineInfo, url: str, seconds: float, *, credentials: str = "") -> str:
    """Returns the lines printed once the server answers. seconds: how long the start took. credentials: more options
    for curl."""
    cache_mib = info.max_total_tokens * info.kv_bytes_per_token / 2**20
    cache = f"  KV cache  {info.max_total_tokens:,} tokens ({cache_mib:,.0f} MiB, taken as used)"
    path, example = "/generate", EXAMPLE
    if info.pooling is not None:
        cache = f"  makes     embeddings of {info.hidden_size:,} numbers"
        path, example = "/v1/embeddings", EMBEDDING_EXAMPLE
    return "\n".join(
        (
            "",
            f"  tureen is ready at {url}  (after {seconds:.1f} s)",
            f"  model     {info.model_name}  ({info.architecture}, {info.dtype} on {info.device})",
            f"  context   {info.context_len:,} tokens",
            cache,
            "",
            "  Try it:",
            f"  curl {url}{path}{credentials} -H 'Content-Type: application/json' \\",
            f"    -d '{example}'",
            "",
        )
    )
