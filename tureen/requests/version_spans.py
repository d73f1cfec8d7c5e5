"""Records which version of the weights drew which tokens of an output."""

from __future__ import annotations

from typing import Any

import msgspec


class VersionSpans(msgspec.Struct):
    """The versions of the weights that computed an output: spans of its tokens, in their order."""

    starts: list[tuple[str, int]] = []  # each version with the index of its first token
    num_tokens: int = 0

    def add(self, version: str, num_new: int) -> None:
        """Take a new piece of `num_new` tokens."""
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, self.num_tokens))
        self.num_tokens += num_new

    @property
    def ranges(self) -> list[dict[str, Any]]:
        """The range of tokens of each version, as answers show it."""
        ends = [*(start for _, start in self.starts[1:]), self.num_tokens]
        spans = zip(self.starts, ends, strict=True)
        return [{"version": version, "start": start, "end": end} for (version, start), end in spans if end > start]
