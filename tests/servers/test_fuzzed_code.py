"""What the fuzzer of clients' code began with, and what it found: logits or an error come back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"


@pytest.mark.usefixtures("patient_sandbox")
def test_pickles_of_the_corpus_harm_nothing(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(FUZZ)])
    import processor_target

    files = sorted((FUZZ / "corpus" / "processor").iterdir())
    assert len(files) >= 5
    with processor_target.HELD:
        for path in files:
            data = path.read_bytes()
            processor_target.pickle(data)
            processor_target.pickle(data[: len(data) // 2])
    processor_target.pool.cache_clear()
