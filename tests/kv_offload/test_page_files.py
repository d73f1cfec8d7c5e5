"""Pages in files: a model of the quota, and files that are not as they were written."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numbered_pages import FILE_BYTES, PAGE_BYTES, files_in, key_of, page_files_in, page_of, read_page

from tureen.contract.runner import KvSizes
from tureen.errors import StartupError
from tureen.kv_offload import page_files
from tureen.kv_offload.page_files import PREFIX_BYTES, DamagedPage, PageFiles


class QuotaMachine(RuleBasedStateMachine):
    """`order` lists the pages that must be there, the one used longest ago first. Two processes share the folder."""

    @initialize(most=st.integers(1, 25))
    def start(self, most):
        self.folder = tempfile.TemporaryDirectory()
        self.both = [page_files_in(Path(self.folder.name), most) for _ in range(2)]
        self.most, self.order = most, []

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(number=st.integers(0, 40), who=st.integers(0, 1))
    def write(self, number, who):
        if number in self.order:
            return
        evicted = 0
        if len(self.order) + 1 > self.most:
            room = int(self.most * FILE_BYTES * page_files.LEFT_SHARE)
            left = max(room, FILE_BYTES) // FILE_BYTES - 1
            evicted = len(self.order) - left
            del self.order[:evicted]
        assert self.both[who].write(key_of(number), page_of(number)) == evicted
        self.both[who].touch([key_of(number)])
        self.order.append(number)

    @rule(numbers=st.lists(st.integers(0, 40), unique=True, max_size=6), who=st.integers(0, 1))
    def use(self, numbers, who):
        self.both[who].touch([key_of(number) for number in numbers])
        for number in numbers:
            if number in self.order:
                self.order.remove(number)
                self.order.append(number)

    @rule(number=st.integers(0, 40), who=st.integers(0, 1))
    def remove(self, number, who):
        self.both[who].remove(key_of(number))
        if number in self.order:
            self.order.remove(number)

    @rule(who=st.integers(0, 1))
    def start_again(self, who):
        self.both[who] = page_files_in(Path(self.folder.name), self.most)
        self.both[who].recount()

    @invariant()
    def the_pages_are_those_of_the_model(self):
        if not hasattr(self, "folder"):
            return
        for number in range(41):
            expected = bytes(page_of(number)) if number in self.order else None
            assert self.both[0].has(key_of(number)) == (expected is not None)
            assert read_page(self.both[1], number) == expected
        on_disk = sum(path.stat().st_size for path in files_in(Path(self.folder.name)))
        assert on_disk == len(self.order) * FILE_BYTES == self.both[0].num_bytes <= self.most * FILE_BYTES


QuotaMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
test_pages_in_files_against_a_list = QuotaMachine.TestCase


def test_a_page_that_two_write_at_once_is_counted_once(tmp_path):
    """Both have looked before either wrote."""
    for files in (page_files_in(tmp_path), page_files_in(tmp_path)):
        assert files.write(key_of(1), page_of(1)) == 0
    assert files.num_bytes == sum(path.stat().st_size for path in files_in(tmp_path)) == FILE_BYTES
    assert read_page(files, 1) == bytes(page_of(1))


@pytest.mark.parametrize("at", range(0, FILE_BYTES, 7))
def test_a_page_with_one_wrong_bit_is_not_there_any_more(tmp_path, at):
    files = page_files_in(tmp_path)
    files.write(key_of(1), page_of(1))
    [path] = files_in(tmp_path)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedPage):
        files.read(key_of(1), memoryview(bytearray(PAGE_BYTES)))
    assert not path.exists()
    assert files.num_bytes == 0


@pytest.mark.parametrize(
    "size", [0, 1, PREFIX_BYTES - 1, PREFIX_BYTES, FILE_BYTES - 1, FILE_BYTES + 1, 10 * FILE_BYTES]
)
def test_a_page_of_another_length_is_not_there_any_more(tmp_path, size):
    files = page_files_in(tmp_path)
    files.write(key_of(1), page_of(1))
    [path] = files_in(tmp_path)
    os.truncate(path, size)
    assert read_page(files, 1) is None
    assert not path.exists()


def test_a_page_under_the_name_of_another_is_not_that_page(tmp_path):
    files = page_files_in(tmp_path)
    for number in (1, 2):
        files.write(key_of(number), page_of(number))
    first, second = (tmp_path / "pages" / key_of(n).hex()[:2] / key_of(n).hex() for n in (1, 2))
    second.write_bytes(first.read_bytes())
    assert read_page(files, 2) is None
    assert read_page(files, 1) == page_of(1)


def test_a_link_or_a_pipe_in_place_of_a_page_is_not_read(tmp_path):
    files = page_files_in(tmp_path)
    for number, make in ((1, lambda path: path.symlink_to("/etc/hostname")), (2, os.mkfifo)):
        files.write(key_of(number), page_of(number))
        path = tmp_path / "pages" / key_of(number).hex()[:2] / key_of(number).hex()
        path.unlink()
        make(path)
        with pytest.raises(OSError):
            files.read(key_of(number), memoryview(bytearray(PAGE_BYTES)))


def test_nobody_else_may_read_what_lies_there(tmp_path):
    before = os.umask(0)
    try:
        page_files_in(tmp_path).write(key_of(1), page_of(1))
    finally:
        os.umask(before)
    for path in (tmp_path / "pages").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_quota_below_one_page_does_not_start(tmp_path):
    with pytest.raises(StartupError, match="--kv-disk-size"):
        PageFiles(tmp_path / "pages", sizes=KvSizes(PAGE_BYTES), max_bytes=FILE_BYTES - 1)


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path, monkeypatch):
    files = page_files_in(tmp_path)
    opened = open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            if len(data) > 50:
                return self.file.write(data[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(page_files, "open", lambda *args, **kwargs: Full(opened(*args, **kwargs)), raising=False)
    with pytest.raises(OSError, match="No space left"):
        files.write(key_of(1), page_of(1))
    monkeypatch.undo()
    assert files_in(tmp_path) == []
    assert files.num_bytes == 0
    files.write(key_of(1), page_of(1))
    assert read_page(files, 1) == page_of(1)


def test_unfinished_files_of_the_dead_are_removed_once_they_are_old(tmp_path, monkeypatch):
    files = page_files_in(tmp_path)
    files.write(key_of(1), page_of(1))
    part = files_in(tmp_path)[0].with_name(f".1-1{page_files.PART}")
    part.write_bytes(b"half")
    files.recount()
    assert part.exists()  # somebody may be writing it
    monkeypatch.setattr(page_files, "STALE_S", -1.0)
    files.recount()
    assert not part.exists()
    assert read_page(files, 1) == page_of(1)


def test_what_is_no_page_is_neither_counted_nor_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(page_files, "STALE_S", -1.0)
    files = page_files_in(tmp_path, 3)
    files.write(key_of(1), page_of(1))
    home = files_in(tmp_path)[0].parent
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = [home / "notes.txt", home / "mine.part", elsewhere / key_of(2).hex(), tmp_path / "pages" / "qq" / "a"]
    others[-1].parent.mkdir()
    for other in others:
        other.write_bytes(b"somebody's" * 1000)
    taken = {home.name, *(key_of(number).hex()[:2] for number in range(9))}
    free = [tmp_path / "pages" / name for name in ("00", "01", "02", "aa", "bb", "cc") if name not in taken]
    free[0].write_bytes(b"a file where a folder of pages could be")
    free[1].symlink_to(elsewhere)
    files.recount()
    assert files.num_bytes == FILE_BYTES
    for number in range(2, 9):
        files.write(key_of(number), page_of(number))
    assert all(other.exists() for other in (*others, free[0], free[1]))
    assert read_page(files, 8) == page_of(8)


def test_a_folder_that_is_a_link_or_open_to_others_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="not a folder"):
        page_files_in(tmp_path)
    (tmp_path / "pages").unlink()
    (tmp_path / "pages").mkdir(mode=0o755)
    with pytest.raises(StartupError, match="chmod 700"):
        page_files_in(tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "pages").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "pages").stat().st_uid + 1)
    with pytest.raises(StartupError, match="another user"):
        page_files_in(tmp_path)
