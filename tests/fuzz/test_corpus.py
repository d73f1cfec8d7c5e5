"""What the fuzzers began with, and what they found: none of it raises anything but a refusal."""

import fuzz_targets
import pytest

FILES = sorted(path for path in fuzz_targets.CORPUS.rglob("*") if path.is_file())
IN_WORKERS = "processor"
"""What only a sealed process may load: tests/servers/test_fuzzed_code.py does."""

HERE = [path for path in FILES if path.parent.name != IN_WORKERS]


@pytest.fixture(autouse=True, scope="module")
def _ended():
    yield
    fuzz_targets.close()


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.parent.name != IN_WORKERS],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_a_file_of_the_corpus_is_taken_or_refused(path):
    data = path.read_bytes()
    fuzz_targets.run(path.parent.name, data)
    fuzz_targets.run(path.parent.name, data[: len(data) // 2])


def test_every_target_has_a_corpus():
    assert {path.parent.name for path in FILES} == set(fuzz_targets.TARGETS)
