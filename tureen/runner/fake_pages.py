"""The KV cache of the fake runner: WIDTH bytes for each token, in pages and in window pages."""

from __future__ import annotations

from tureen.contract.runner import Capacity, Row

WIDTH = 8  # bytes stored per position
POISON = b"\xff" * WIDTH  # stands for NaN: whatever is computed from it is poison too


class FakePages:
    """Stores bytes at the positions of rows. A row with window pages has them there too."""

    def __init__(self, capacity: Capacity) -> None:
        self.page_bytes = capacity.page_size * WIDTH
        self._capacity = capacity
        self._kv = self._window_kv = bytearray()
        self.clear()

    def clear(self, *, is_there: bool = True) -> None:
        """Makes all bytes 0, or takes the memory away."""
        self._kv = bytearray(is_there * self._capacity.num_pages * self.page_bytes)
        self._window_kv = bytearray(is_there * self._capacity.num_window_pages * self.page_bytes)

    def page(self, page: int) -> bytes:
        return bytes(self._kv[self._page(page)])

    def write(self, page: int, data: bytes | memoryview) -> None:
        self._kv[self._page(page)] = data

    def poison(self, page: int) -> None:
        """Makes NaN of a page."""
        self._kv[self._page(page)] = POISON * self._capacity.page_size

    def poison_window(self, page: int) -> None:
        """Makes NaN of a window page."""
        self._window_kv[self._page(page)] = POISON * self._capacity.page_size

    def store(self, row: Row, position: int, value: bytes) -> None:
        self._kv[self._at(row, position)] = value
        if row.window_pages:
            self._window_kv[self._in_window(row, position)] = value

    def read(self, row: Row, position: int) -> bytes:
        return bytes(self._kv[self._at(row, position)])

    def up_to(self, row: Row, position: int) -> bytes:
        """Returns all that is stored from the row's first token to `position`."""
        num_full, rest = divmod(position + 1, self._capacity.page_size)
        pages = [self.page(page) for page in row.pages[:num_full]]
        if rest:
            pages.append(self.page(row.pages[num_full])[: rest * WIDTH])
        return b"".join(pages)

    def check_window(self, row: Row) -> None:
        """Raises RuntimeError if the window pages do not hold what the row's first token sees."""
        if not row.window_pages:
            return
        for position in range(max(0, row.start + 1 - self._capacity.window), row.start):
            if self._window_kv[self._in_window(row, position)] != self.read(row, position):
                raise RuntimeError(f"the window page of position {position} holds another token")

    def _page(self, page: int) -> slice:
        return slice(page * self.page_bytes, (page + 1) * self.page_bytes)

    def _at(self, row: Row, position: int) -> slice:
        page, offset = divmod(position, self._capacity.page_size)
        return _place(row.pages[page] * self.page_bytes, offset)

    def _in_window(self, row: Row, position: int) -> slice:
        page, offset = divmod(position, self._capacity.page_size)
        index = page - row.window_from
        if not 0 <= index < len(row.window_pages):
            raise RuntimeError(f"the row has no window page of position {position}")
        return _place(row.window_pages[index] * self.page_bytes, offset)


def _place(page_start: int, offset: int) -> slice:
    start = page_start + offset * WIDTH
    return slice(start, start + WIDTH)
