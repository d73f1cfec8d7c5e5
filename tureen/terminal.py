"""Shows the operator the progress of start-up and the ready banner.

Imports: contract; rich.
Imported by: server.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from tureen.contract.types import EngineInfo

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

EMBEDDING_EXAMPLE = '{"input": ["A cat sleeps on the sofa.", "A kitten naps on the couch."]}'
EXAMPLE = '{"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}'


class PhaseDisplay:
    """A `Progress` that shows bars on a terminal, one plain line a phase otherwise. A context manager."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard error, if none is given."""
        self._stream = stream = stream or sys.stderr
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
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
                self._tasks[phase] = self._bars.add_task(phase, total=total or None)
            self._bars.update(self._tasks[phase], completed=done, total=total or None)
            return
        if phase not in self._started:
            self._started[phase] = time.monotonic()
        if total and done >= total and self._started[phase] >= 0:
            print(f"{phase}: {time.monotonic() - self._started[phase]:.2f} s", file=self._stream, flush=True)
            self._started[phase] = -1.0


def _bars(stream: TextIO) -> Bars:
    from rich import progress  # noqa: PLC0415 - for terminals; what runs unattended does without
    from rich.console import Console  # noqa: PLC0415

    return progress.Progress(
        progress.SpinnerColumn(finished_text="✓"),
        progress.TextColumn("{task.description:<20}"),
        progress.BarColumn(bar_width=28),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
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
