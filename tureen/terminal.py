"""Shows the operator the progress of start-up and the ready banner.

Imports: contract, log; tqdm.
Imported by: data_parallel, server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from tureen.contract.types import EngineInfo
from tureen.log import BYTES, size

if TYPE_CHECKING:
    from tqdm import tqdm

EMBEDDING_EXAMPLE = '{"input": ["A cat sleeps on the sofa.", "A kitten naps on the couch."]}'
RERANK_EXAMPLE = '{"query": "pets", "documents": ["A cat sleeps.", "Taxes rise."]}'
EXAMPLE = '{"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}'


BYTES_FORM = "{desc} {bar:16} {n_fmt}/{total_fmt}iB {rate_fmt} {remaining} left"
COUNT_FORM = "{desc} {bar:28} {n_fmt}/{total_fmt} {elapsed}"
NAME_WIDTH = 28
"""Characters of a phase's name beside a bar: the line fits a terminal of 80 columns."""
MIB = 2**20
PLAIN_SECONDS = 10.0
"""Seconds between two lines about a download where there is no terminal."""


class PhaseDisplay:
    """A `Progress` that shows bars on a terminal until they are full, plain lines otherwise. A context manager.

    A phase that ends with BYTES has sizes, their rate and the time left. Without a terminal it gets a line when it
    begins, each PLAIN_SECONDS and at its end; others get one at their end, those of unknown length one when they begin.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard error, if none is given."""
        self._stream = stream = stream or sys.stderr
        self._bars: dict[str, tqdm[Any]] | None = {} if stream.isatty() else None
        self._started: dict[str, float] = {}
        self._transfers: dict[str, Transfer] = {}

    def __enter__(self) -> PhaseDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for bar in (self._bars or {}).values():
            bar.close()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._bars is not None:
            if phase not in self._bars:
                self._bars[phase] = _bar(phase, done, total, self._stream)
            bar = self._bars[phase]
            bar.total = total or None
            bar.update(done - bar.n)
            if total and done >= total:  # so no line of the log stands in it
                self._bars.pop(phase).close()
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
            told = f"{self._name}: {total / MIB:,.1f} MiB in {now - self._began:.1f} s"
            return "" if was == "over" else f"{told} ({rate / MIB:,.1f} MiB/s)" if rate else told
        if self._state == "new":
            self._state = "running"
            return f"{self._name}: {'resuming at ' if done else ''}{_share(done, total)}"
        if now - self._told < PLAIN_SECONDS:
            return ""
        self._told = now
        left = f", {(total - done) / rate:.0f} s left" if rate and total else ""
        return f"{self._name}: {_share(done, total)}, {rate / MIB:,.1f} MiB/s{left}"


def _share(done: int, total: int) -> str:
    return f"{done / MIB:,.1f} of {total / MIB:,.1f} MiB" if total else f"{done / MIB:,.1f} MiB"


def _bar(phase: str, done: int, total: int, stream: TextIO) -> tqdm[Any]:
    """Returns a bar that is removed when it is closed; its rate does not count what is `done` already. total: 0 if
    it is not known."""
    from tqdm import tqdm  # noqa: PLC0415 - for terminals; what runs unattended does without

    tqdm.monitor_interval = 0  # it would start a thread
    is_bytes = phase.endswith(BYTES)
    name = phase.removesuffix(BYTES)
    return tqdm(
        desc=f"{name:<20}" if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…",
        initial=done,
        total=total or None,
        file=stream,
        leave=False,
        unit="iB" if is_bytes else "it",
        unit_scale=is_bytes,
        unit_divisor=1024,
        bar_format=BYTES_FORM if is_bytes else COUNT_FORM,
    )


class Access(NamedTuple):
    """How a server is reached: its URL as curl takes it, more options for curl, and the Unix socket that it listens
    on."""

    url: str
    credentials: str = ""
    uds: str | None = None


def banner(info: EngineInfo, access: Access, seconds: float, *, others: Sequence[str] = ()) -> str:
    """Returns the lines printed once the server answers. seconds: how long the start took. others: names of the models
    that are loaded when they are asked for."""
    url, credentials, uds = access
    cache_size = size(info.max_total_tokens * info.kv_bytes_per_token)
    cache = f"  KV cache  {info.max_total_tokens:,} tokens (up to {cache_size}, allocated on demand)"
    inputs = f", {info.activations} activations" if info.activations else ""
    path, example, page = "/generate", EXAMPLE, "/"
    if info.classifier is not None:
        cache = f"  scores    {', '.join(info.classifier.labels[:8])}"
        path, example, page = "/v1/rerank", RERANK_EXAMPLE, "/docs"
    elif info.pooling is not None:
        cache = f"  makes     embeddings of {info.hidden_size:,} numbers"
        path, example, page = "/v1/embeddings", EMBEDDING_EXAMPLE, "/docs"
    return "\n".join(
        (
            "",
            *(
                []
                if uds
                else [f"  Open {url}{page} in a browser", f"  status    {url}/status", f"  API       {url}/docs"]
            ),
            f"  model     {info.model_name}  ({info.architecture}, {info.dtype} on {info.device}{inputs})",
            *([f"  also      {', '.join(others)}  (loaded on first use)"] if others else []),
            f"  context   {info.context_len:,} tokens",
            cache,
            "",
            f"  tureen is ready at {url if uds is None else f'unix:{uds}'}  (after {seconds:.1f} s). Try it:",
            f"  curl {url}{path}{credentials} -H 'Content-Type: application/json' \\",
            f"    -d '{example}'",
            "",
        )
    )
