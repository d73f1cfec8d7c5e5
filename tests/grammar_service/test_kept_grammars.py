"""Grammars kept on disk: what took long is there after a restart, and what is wrong with a file makes it a miss."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tureen.grammar import Unenforced, Vocabulary
from tureen.grammar_service import kept_grammars
from tureen.grammar_service.kept_grammars import KeptGrammars
from tureen.grammar_service.messages import CompileReply
from tureen.kernels.cpu import native

VOCABULARY = Vocabulary(tokens=(b"a", b"b"), eos_token_ids=(2,), size=3)
REPLY = CompileReply(b"start: T0", unenforced=(Unenforced("uniqueItems", "/tags", "#/properties/tags", "it is long"),))


@pytest.fixture
def open_kept(tmp_path):
    """Opens the folder as a server does that starts."""

    def open_(vocabulary=VOCABULARY):
        kept = KeptGrammars(tmp_path / "grammars")
        kept.list_files(vocabulary)
        return kept

    return open_


def test_what_one_server_keeps_the_next_one_reads(open_kept):
    open_kept().write(b"spec", REPLY)
    after = open_kept()
    assert after.has(b"spec")
    assert after.read(b"spec") == REPLY
    assert not after.has(b"other spec")


def test_nothing_is_there_before_the_folder_is_opened(open_kept, tmp_path):
    open_kept().write(b"spec", REPLY)
    assert not KeptGrammars(tmp_path / "grammars").has(b"spec")


@pytest.mark.parametrize(
    "changed",
    [
        {"vocabulary": Vocabulary(tokens=(b"a", b"c"), eos_token_ids=(2,), size=3)},
        {"vocabulary": Vocabulary(tokens=(b"a", b"b"), eos_token_ids=(1,), size=3)},
    ],
)
def test_what_was_made_for_another_vocabulary_is_not_there(open_kept, changed):
    open_kept().write(b"spec", REPLY)
    assert not open_kept(**changed).has(b"spec")


def test_what_other_kernels_made_is_not_there(open_kept, monkeypatch, tmp_path):
    open_kept().write(b"spec", REPLY)
    other = tmp_path / "other.so"
    other.write_bytes(b"other kernels")
    monkeypatch.setattr(native, "require", lambda: SimpleNamespace(__file__=str(other)))
    assert not open_kept().has(b"spec")


def damaged(data):
    """Each byte in turn with another value, and the file cut short or longer."""
    for index in range(len(data)):
        yield data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        yield data[:index]
    yield data + b"\0"


def test_a_damaged_file_is_a_miss_whatever_is_wrong_with_it(open_kept, tmp_path):
    kept = open_kept()
    kept.write(b"spec", REPLY)
    (path,) = (tmp_path / "grammars").iterdir()
    for data in damaged(path.read_bytes()):
        kept.write(b"spec", REPLY)
        assert kept.has(b"spec")
        path.write_bytes(data)
        assert kept.read(b"spec") is None
        assert not kept.has(b"spec")


def test_a_file_that_others_may_write_or_a_link_is_a_miss(open_kept, tmp_path):
    open_kept().write(b"spec", REPLY)
    (path,) = (tmp_path / "grammars").iterdir()
    path.chmod(0o622)
    assert open_kept().read(b"spec") is None
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert open_kept().read(b"spec") is None


def test_only_this_user_may_read_what_is_kept(open_kept, tmp_path):
    open_kept().write(b"spec", REPLY)
    folder = tmp_path / "grammars"
    (path,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_the_files_that_were_used_longest_ago_go_first(open_kept, monkeypatch, tmp_path):
    kept = open_kept()
    kept.write(b"0", REPLY)
    (path,) = (tmp_path / "grammars").iterdir()
    monkeypatch.setattr(kept_grammars, "MAX_BYTES", 3 * path.stat().st_size)
    for number in range(1, 3):
        kept.write(b"%d" % number, REPLY)
    for number in range(3):
        os.utime(kept._path(b"%d" % number), (number + 1, number + 1))
    kept.read(b"0")  # the newest now
    kept.write(b"3", REPLY)
    assert [kept.has(b"%d" % number) for number in range(4)] == [True, False, True, True]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    kept = KeptGrammars(tmp_path / "file" / "grammars")
    kept.list_files(VOCABULARY)
    kept.write(b"spec", REPLY)
    assert not kept.has(b"spec")


def test_clear_removes_all(open_kept, tmp_path):
    kept = open_kept()
    kept.write(b"spec", REPLY)
    kept.clear()
    assert not kept.has(b"spec")
    assert list((tmp_path / "grammars").iterdir()) == []
