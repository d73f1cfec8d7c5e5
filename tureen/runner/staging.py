"""What a decode step sends to the device, in one copy, and what it brings back, in one copy.

The page tables stay on the device. A step's copy brings each row's current page. A whole table is sent only if a slot
has another sequence, or its pages changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tureen.contract.runner import Row

FIELDS = 5
"""The integers of a row: token, position, slot of its keys, table, page of its keys."""
RESULTS = 3
"""The integers that come back for a row: the best token or a mark, the token of the peak, the bits of the peak."""


class Staged(NamedTuple):
    """The integers of a step on the device, int64 [rows] each."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    tables: Tensor
    pages: Tensor


class StepSizes(NamedTuple):
    """The sizes of the buffers."""

    most_rows: int  # of a step
    num_slots: int
    table_width: int  # pages
    page_size: int
    scratch_page: int  # for rows that fill up a step


class Staging:
    """Buffers that keep their addresses, so that captured steps read and write them."""

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._sizes = sizes
        self._device = device
        width = _stride(sizes.most_rows)
        self._sent = torch.zeros(FIELDS * width, dtype=torch.int64, pin_memory=is_pinned)
        self._taken = torch.zeros(RESULTS * width, dtype=torch.int64, pin_memory=is_pinned)
        self._sent_numbers, self._taken_numbers = self._sent.numpy(), self._taken.numpy()
        self._inputs = torch.zeros(FIELDS * width, dtype=torch.int64, device=device)
        self._results = torch.zeros(RESULTS * width, dtype=torch.int64, device=device)
        shape = sizes.num_slots + 1, sizes.table_width  # the last one is of rows that fill up a step
        self.tables = torch.full(shape, sizes.scratch_page, dtype=torch.int32, device=device)
        self._known: list[tuple[int, ...]] = [()] * sizes.num_slots

    def inputs(self, count: int) -> Staged:
        """Returns the places of the integers of a step of `count` rows."""
        return Staged(*_cut(self._inputs, FIELDS, count))

    def results(self, count: int) -> Tensor:
        """Returns the place of what a step of `count` rows brings back, int64 [RESULTS, count]."""
        results: Tensor = _cut(self._results, RESULTS, count)
        return results

    def patch_tables(self, staged: Staged) -> None:
        """Writes each row's current page into its table, on the device."""
        places = staged.tables, staged.positions // self._sizes.page_size
        self.tables.index_put_(places, staged.pages.to(torch.int32))

    def send(self, rows: Sequence[Row], count: int) -> None:
        """Sends the rows' integers, and fills up with rows of the scratch page to `count`."""
        size, scratch, used = self._sizes.page_size, self._sizes.scratch_page, len(rows)
        numbers = _cut(self._sent_numbers, FIELDS, count)
        numbers[:, used:] = np.array([0, 0, scratch * size, self._sizes.num_slots, scratch])[:, None]
        starts = [row.start for row in rows]
        numbers[0, :used] = [row.token_ids[0] for row in rows]
        numbers[1, :used] = starts
        numbers[3, :used] = [row.slot for row in rows]
        numbers[4, :used] = [row.pages[start // size] for row, start in zip(rows, starts, strict=True)]
        numbers[2, :used] = numbers[4, :used] * size + numbers[1, :used] % size
        for row in rows:
            self._renew_table(row)
        end = FIELDS * _stride(count)
        self._inputs[:end].copy_(self._sent[:end], non_blocking=True)

    def take(self, count: int) -> NDArray[np.int64]:
        """Waits for what a step of `count` rows brings back: [RESULTS, count]. It holds until the next step."""
        end = RESULTS * _stride(count)
        self._taken[:end].copy_(self._results[:end], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        taken: NDArray[np.int64] = _cut(self._taken_numbers, RESULTS, count)
        return taken

    def _renew_table(self, row: Row) -> None:
        """Sends a whole table unless the device has its pages before the current one."""
        known, pages = self._known[row.slot], row.pages
        if known == pages:
            return
        before = row.start // self._sizes.page_size
        if known[:before] != pages[:before]:
            self.tables[row.slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32).to(self._device)
            self._known[row.slot] = pages
        else:
            self._known[row.slot] = pages[: before + 1]


def _cut(buffer: Any, fields: int, count: int) -> Any:
    """Returns the part of a buffer that a step of `count` rows uses, [fields, count]."""
    stride = _stride(count)
    return buffer[: fields * stride].reshape(fields, stride)[:, :count]


def _stride(count: int) -> int:
    """Returns the distance of fields: each begins at a multiple of 16 bytes, for which kernels are compiled."""
    return count + count % 2
