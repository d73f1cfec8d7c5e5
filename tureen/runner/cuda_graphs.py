"""Decode steps that are captured once for each number of rows, and then replayed without Python (CUDA graphs).

A captured step has fixed shapes: rows are filled up to the next of ROW_COUNTS, keys to the next of KEY_COUNTS. The
first step of a shape runs as it is, which also prepares the libraries; the second one is captured. Every other batch
runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tureen.attention.base import CapturedBackend, ModelInput, PageTables, RotatingBackend
from tureen.contract.runner import Batch, Capacity, Row
from tureen.log import get_logger
from tureen.models.torch_decoder import DecoderModel
from tureen.runner.forward import ForwardOutput
from tureen.runner.staging import Staging, StepSizes
from tureen.sampling.arithmetic import Peaks
from tureen.sampling.probability import peak_tokens
from tureen.sampling.torch_arithmetic import marked

ROW_COUNTS = (1, 2, 4, *range(8, 257, 8))
KEY_COUNTS = tuple(512 << power for power in range(20))
MOST_GATHERED, MOST_SUMMED = 1 << 18, 1 << 21
"""Most keys of a captured step, all rows as long as the longest: of a backend that copies keys, and of one that reads
them in place and keeps a sum for each section. A layer of 32 and 8 heads of 128 numbers then takes 1 GB, or 0.1 GB."""

log = get_logger("cuda_graphs")


class Recorder(Protocol):
    """Captures a function's launches."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that repeats them, on what the same tensors hold then. The function itself need not
        compute. Raises RuntimeError."""


class CudaRecorder:
    """Captures CUDA graphs, which share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                function()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails may leave its own
        replay: Callable[[], None] = graph.replay
        return replay


class DecodeSteps:
    """The captured steps of a model."""

    def __init__(
        self,
        model: DecoderModel,
        attention: CapturedBackend,
        capacity: Capacity,
        recorder: Recorder,
        device: torch.device,
        scratch_page: int,
    ) -> None:
        """scratch_page: a page of the cache that no sequence uses."""
        self._model = model
        self._attention = attention
        self._recorder = recorder
        self._most_together = MOST_SUMMED if isinstance(attention, RotatingBackend) else MOST_GATHERED
        self._most_keys = _at_least(KEY_COUNTS, capacity.context_len)
        self._most_rows = min(ROW_COUNTS[-1], _at_least(ROW_COUNTS, min(capacity.max_rows, ROW_COUNTS[-1])))
        width = -(-self._most_keys // capacity.page_size)
        sizes = StepSizes(self._most_rows, capacity.max_rows, width, capacity.page_size, scratch_page)
        self._staging = Staging(sizes, device)
        self._logits = torch.empty(self._most_rows, capacity.vocab_size, dtype=torch.float32, device=device)
        self._replays: dict[tuple[int, int], Callable[[], None] | None] = {}  # None: the shape was seen once
        self._is_off = False

    def run(self, batch: Batch, *, best_only: bool) -> ForwardOutput | None:
        """Computes a step, if it is one that can be captured; else returns None and does nothing."""
        rows = batch.rows
        if self._is_off or len(rows) > self._most_rows or not all(map(_is_plain, rows)):
            return None
        shape = _at_least(ROW_COUNTS, len(rows)), self._num_keys(rows)
        if shape[0] * shape[1] > self._most_together:
            return None
        self._staging.send(rows, shape[0])
        if shape in self._replays:
            replay = self._replays[shape] or self._capture(shape)
            replay()
        else:
            self._replays[shape] = None
            self._compute(*shape)
        best, tokens, bits = self._staging.take(shape[0])[:, : len(rows)]
        if best_only:
            return ForwardOutput(best.tolist())
        values = bits.astype(np.int32).view(np.float32)
        return ForwardOutput((), self._logits[: len(rows)], Peaks(values, tokens.copy()))

    def _num_keys(self, rows: Sequence[Row]) -> int:
        return min(self._most_keys, _at_least(KEY_COUNTS, max(row.start for row in rows) + 1))

    def _capture(self, shape: tuple[int, int]) -> Callable[[], None]:
        """Captures a shape. If that fails, says so once: this step, and all steps later, run without graphs."""

        def compute() -> None:
            self._compute(*shape)

        try:
            replay = self._replays[shape] = self._recorder.capture(compute)
        except RuntimeError as error:
            log.warning("CUDA graphs cannot be captured, so decode steps are several times slower: %s", error)
            self._is_off = True
            return compute
        return replay

    def _compute(self, count: int, num_keys: int) -> None:
        """Computes a step of `count` rows from the staged integers, all on the device."""
        staged = self._staging.inputs(count)
        self._staging.patch_tables(staged)
        tables = PageTables(self._staging.tables, staged.tables, num_keys)
        inputs = ModelInput(staged.token_ids, staged.positions, staged.kv_slots, (), None)
        self._attention.plan_tables(inputs, tables)
        logits = self._logits[:count]
        logits.copy_(self._model.logits(self._model.forward(inputs, self._attention)))
        _note_best(logits, self._staging.results(count))


def can_capture(model: DecoderModel, capacity: Capacity) -> bool:
    """Returns whether decode steps of this model can be captured.

    Experts are computed in a loop on the host, layers without attention read their rows' states one by one, and layers
    with pages of their own need a second table.
    """
    return not model.experts() and model.states is None and not capacity.num_window_pages


def _is_plain(row: Row) -> bool:
    """Returns whether a row only draws the token after one known token, without an adapter."""
    if len(row.token_ids) != 1 or not row.sample or row.num_drafts or row.adapter or row.score_targets:
        return False
    return row.hidden_from is None and not row.embeds and not row.places and not row.pictures


def _at_least(counts: Sequence[int], number: int) -> int:
    return next(count for count in counts if count >= number)


def _note_best(logits: Tensor, results: Tensor) -> None:
    """Writes the best token of each row, or a mark, and its peak; see RESULTS."""
    values = logits.amax(dim=1)
    tokens = peak_tokens(logits, values)
    results[0].copy_(marked(values, tokens, values.isfinite()))
    results[1].copy_(tokens)
    results[2].copy_(values.view(torch.int32))
