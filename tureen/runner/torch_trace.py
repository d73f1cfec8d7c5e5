"""Traces by torch's own profiler: each operation of the steps that run, on the GPU each kernel."""

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
    """Made, called and written in the thread that computes."""

    def __init__(self, options: TraceOptions, *, on_gpu: bool) -> None:
        """Raises InvalidRequest for a GPU that there is not."""
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
        """Under a name that says what the step is of."""
        facts = ", ".join(f"{name} {value}" for name, value in describe(batch).items())
        with torch.profiler.record_function(f"step: {facts}"):
            yield

    def write(self, file: BinaryIO) -> None:
        """Raises OSError."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:  # torch takes a name only
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            with path.open("rb") as written:
                shutil.copyfileobj(written, file)
