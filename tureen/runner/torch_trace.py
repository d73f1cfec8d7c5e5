"""Records traces by torch's own profiler: each operation of the steps that run, on the GPU each kernel."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from tureen.contract.runner import Batch
from tureen.runner.trace import TraceOptions, describe, no_gpu


class TorchTrace:
    """A Trace by torch.profiler. It is made, called and written in the thread that computes."""

    def __init__(self, options: TraceOptions, *, on_gpu: bool) -> None:
        """Begins to record. Raises InvalidRequest where a GPU is asked for and there is none."""
        if "GPU" in options.activities and not on_gpu:
            raise no_gpu()
        names = options.activities or (("CPU", "GPU") if on_gpu else ("CPU",))
        kinds = {"CPU": torch.profiler.ProfilerActivity.CPU, "GPU": torch.profiler.ProfilerActivity.CUDA}
        self._profile = torch.profiler.profile(
            activities=[kinds[name] for name in names],
            with_stack=options.with_stack,
            record_shapes=options.record_shapes,
        )
        self._profile.start()

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Records what runs inside the context, under a name that describes the batch."""
        facts = ", ".join(f"{name} {value}" for name, value in describe(batch).items())
        with torch.profiler.record_function(f"step: {facts}"):
            yield

    def write(self, file: BinaryIO) -> None:
        """Ends the recording and writes the trace. Raises OSError."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:  # torch takes a name only
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            with path.open("rb") as written:
                shutil.copyfileobj(written, file)
