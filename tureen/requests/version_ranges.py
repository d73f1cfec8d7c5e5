"""Reports the version of the weights that drew each range of an output's tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from tureen.requests.generation import Output


def version_ranges(output: Output) -> list[dict[str, Any]]:
    """Returns the range of tokens of each version, as answers show it."""
    ends = accumulate(count for _, count in output.versions)
    spans = zip(output.versions, ends, strict=True)
    return [{"version": version, "start": end - count, "end": end} for (version, count), end in spans if count]
