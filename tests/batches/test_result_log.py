"""The files of answers are their own journal: whatever a crash leaves, whole lines count and nothing else does."""

from __future__ import annotations

import errno
import json

import msgspec
import pytest

from tureen.batches import results
from tureen.batches.contents import Contents
from tureen.batches.records import BatchRecord, Counts
from tureen.batches.results import LineFailure, Response, ResultLog, answered, failed

BATCH = BatchRecord(
    id="batch_ab",
    client="",
    endpoint="/v1/completions",
    input_file_id="file-in",
    completion_window="24h",
    created_at=0,
    expires_at=86400,
    counts=Counts(9),
)


def answer(number: int, status: int = 200):
    return answered(BATCH, number, f"r{number}", Response(status, "id", msgspec.Raw(b'{"text": "\xc3\xbc\\n"}')))


def numbers(path) -> list[int]:
    return [int(json.loads(line)["custom_id"][1:]) for line in path.read_bytes().splitlines()]


@pytest.fixture
def contents(tmp_path):
    return Contents(tmp_path)


def test_wherever_the_last_write_was_cut_the_whole_lines_count_and_the_rest_goes(contents, tmp_path):
    log = ResultLog(contents, BATCH)
    log.append([answer(number) for number in (4, 1, 7)])
    path = tmp_path / BATCH.output_id
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        log = ResultLog(contents, BATCH)
        expected = [4, 1, 7][: whole[:end].count(b"\n")]
        assert (log.done, log.counts.completed) == (set(expected), len(expected))
        log.append([answer(number) for number in (1, 4, 5, 7)])
        assert numbers(path) == [*expected, *(number for number in (1, 4, 5, 7) if number not in expected)]


@pytest.mark.parametrize("rubbish", [b"\0" * 50 + b"\n", b"{}\n", b'{"id": "x"}\n', b"[\n", b"\n", b"\xff\n"])
def test_what_is_no_line_of_ours_goes_with_all_behind_it(contents, tmp_path, rubbish):
    path = tmp_path / BATCH.output_id
    path.write_bytes(answer(1).text + rubbish + answer(2).text)
    log = ResultLog(contents, BATCH)
    assert (log.done, path.read_bytes()) == ({1}, answer(1).text)


def test_answers_and_errors_are_in_two_files_and_counted_apart(contents, tmp_path):
    log = ResultLog(contents, BATCH)
    num_bytes = log.append([answer(1), answer(2, 400), failed(BATCH, 3, "r3", LineFailure("batch_expired", "late"))])
    assert numbers(tmp_path / BATCH.output_id) == [1]
    assert numbers(tmp_path / BATCH.error_id) == [2, 3]
    again = ResultLog(contents, BATCH)
    assert log.counts == again.counts == Counts(9, 1, 2)
    assert log.sizes == again.sizes
    assert num_bytes == sum(log.sizes)


def test_a_write_that_fails_adds_nothing_to_either_file(contents, tmp_path, monkeypatch):
    log = ResultLog(contents, BATCH)
    log.append([answer(1)])
    write = results._write
    monkeypatch.setattr(results, "_write", lambda file, text: write(file, text[:9]) and _fail(text))
    with pytest.raises(OSError, match="No space"):
        log.append([answer(2), answer(3, 500)])
    monkeypatch.undo()
    assert (log.done, log.counts) == ({1}, Counts(9, 1, 0))
    log.append([answer(2), answer(3, 500)])
    assert numbers(tmp_path / BATCH.output_id) == [1, 2]
    assert numbers(tmp_path / BATCH.error_id) == [3]


def _fail(_: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_another_program_changed_gets_no_answer(contents, tmp_path):
    """Otherwise answers that are gone would count; the batch's next job reads the file again."""
    log = ResultLog(contents, BATCH)
    log.append([answer(1)])
    (tmp_path / BATCH.output_id).unlink()
    with pytest.raises(OSError, match="another program changed"):
        log.append([answer(2)])
    assert log.done == {1}
    assert ResultLog(contents, BATCH).done == set()
