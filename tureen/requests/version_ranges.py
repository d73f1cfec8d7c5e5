"""Reports which version of the weights drew which tokens of an output."""

from __future__ import annotations

from typing import Any

from tureen.requests.generation import Output


def version_ranges(output: Output) -> list[dict[str, Any]]:
    """Returns the range of tokens of each version, as answers show it."""
    ends = [*(start for _, start in output.versions[1:]), len(output.token_ids)]
    spans = zip(output.versions, ends, strict=True)
    return [{"version": version, "start": start, "end": end} for (version, start), end in spans if end > start]
