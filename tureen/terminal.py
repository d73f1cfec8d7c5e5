"""Shows the operator the progress of start-up and the ready banner.

Imports: contract; tqdm.
Imported by: server.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from tureen.contract.types import EngineInfo

if TYPE_CHECKING:
    from tqdm import tqdm

EMBEDDING_EXAMPLE = '{"input": ["A cat sleeps on the sofa.", "A kitten naps on the couch."]}'
EXAMPLE = '{"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}'


class PhaseDisplay:
    """A `Progress` that shows bars on a terminal, one plain line a phase otherwise. A context manager."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard error, if none is given."""
        self._stream = stream = stream or sys.stderr
        self._bars: dict[str, tqdm[Any]] | None = {} if stream.isatty() else None
        self._started: dict[str, float] = {}

    def __enter__(self) -> PhaseDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for bar in (self._bars or {}).values():
            bar.close()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._bars is not None:
            bar = self._bars.get(phase) or self._bars.setdefault(phase, _bar(phase, self._stream))
            bar.total = total or None
            bar.update(done - bar.n)
            return
        if phase not in self._started:
            self._started[phase] = time.monotonic()
        if total and done >= total and self._started[phase] >= 0:
            print(f"{phase}: {time.monotonic() - self._started[phase]:.2f} s", file=self._stream, flush=True)
            self._started[phase] = -1.0


def _bar(phase: str, stream: TextIO) -> tqdm[Any]:
    """Returns a bar that is removed when it is closed."""
    from tqdm import tqdm  # noqa: PLC0415 - for terminals; what runs unattended does without

    tqdm.monitor_interval = 0  # it would start a thread
    return tqdm(
        desc=f"{phase:<20}",
        file=stream,
        leave=False,
        bar_format="{desc} {bar:28} {n_fmt}/{total_fmt} {elapsed}",
    )


def banner(info: EngineInfo, url: str, seconds: float, *, credentials: str = "", uds: str | None = None) -> str:
    """Returns the lines printed once the server answers. seconds: how long the start took. credentials: more options
    for curl. uds: the Unix socket that it listens on."""
    cache_mib = info.max_total_tokens * info.kv_bytes_per_token / 2**20
    cache = f"  KV cache  {info.max_total_tokens:,} tokens ({cache_mib:,.0f} MiB, taken as used)"
    path, example = "/generate", EXAMPLE
    if info.pooling is not None:
        cache = f"  makes     embeddings of {info.hidden_size:,} numbers"
        path, example = "/v1/embeddings", EMBEDDING_EXAMPLE
    return "\n".join(
        (
            "",
            f"  tureen is ready at {url if uds is None else f'unix:{uds}'}  (after {seconds:.1f} s)",
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
