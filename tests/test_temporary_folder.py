"""Folders whose owners were killed are removed at the next start; all others stay."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing

import pytest

from tureen.temporary_folder import TemporaryFolder


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def kill_owner(folder: TemporaryFolder) -> None:
    """Do what the kernel does when the process that made the folder ends."""
    os.close(folder._lock)
    folder._lock = -1


def test_only_this_user_can_open_the_folder_and_closing_removes_it(place):
    folder = TemporaryFolder("fronts")
    (folder.path / "socket").touch()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert list(place.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_and_folders_in_use_stay(place):
    left, used = TemporaryFolder("ranks"), TemporaryFolder("chat")
    for folder in (left, used):
        (folder.path / "socket").touch()
    kill_owner(left)
    with closing(TemporaryFolder("fronts")) as new:
        assert set(place.iterdir()) == {used.path, new.path}
        assert (used.path / "socket").exists()
    used.close()


def test_another_user_s_folders_and_targets_of_links_stay(place, monkeypatch):
    target = place / "target"
    target.mkdir()
    (target / "file").touch()
    (place / "tureen_link").symlink_to(target)
    (place / "tureen_file").touch()
    left = TemporaryFolder("ranks")
    kill_owner(left)
    (left.path / "link").symlink_to(target)
    me = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        TemporaryFolder("chat").close()
    assert left.path.exists()
    TemporaryFolder("chat").close()
    assert sorted(path.name for path in place.rglob("*")) == ["file", "target", "tureen_file", "tureen_link"]


@pytest.mark.parametrize("name", ["tureen_models", "tureen_ranks_12345678", "tureen_ranks"])
def test_a_folder_of_the_user_s_own_stays_whatever_its_name(place, name):
    (place / name).mkdir()
    (place / name / "file").touch()
    TemporaryFolder("ranks").close()
    assert [path.name for path in place.rglob("*")] == [name, "file"]
