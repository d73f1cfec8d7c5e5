"""T20: a file name reaches plain files below one folder, and no answer tells what else there is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from PIL import Image
from stored_pictures import stored

from tureen.errors import Forbidden, StartupError
from tureen.media.files import media_root, read_below

CANARY = b"\x89PNG canary"


@pytest.fixture
def folder(tmp_path):
    """root/ with pictures, and beside it what must stay hidden."""
    root = tmp_path / "root"
    (root / "deep" / "er").mkdir(parents=True)
    secret = tmp_path / "secret.png"
    for path in (root / "dog.png", root / "deep" / "er" / "ü cat.png", root / ".hidden", secret):
        path.write_bytes(CANARY)
    (root / "out.png").symlink_to(secret)
    (root / "in.png").symlink_to(root / "dog.png")
    (root / "outside").symlink_to(tmp_path)
    (root / "loop.png").symlink_to(root / "loop.png")
    os.mkfifo(root / "fifo.png")
    os.mknod(root / "socket.png", stat.S_IFSOCK | 0o600)
    with open(root / "sparse.png", "wb") as file:
        file.truncate(10 << 30)
    (root / "unreadable.png").write_bytes(CANARY)
    (root / "unreadable.png").chmod(0)
    return root


@pytest.mark.parametrize("name", ["dog.png", "./dog.png", "deep/er/ü cat.png", "deep//er/./ü cat.png", ".hidden"])
def test_a_plain_file_below_the_folder_is_read(folder, name):
    assert read_below(folder, name) == CANARY
    assert read_below(folder, str(folder / name)) == CANARY


def test_an_absolute_name_may_go_over_a_link_that_the_operator_gave_or_the_folder_itself(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert read_below(link, str(link / "dog.png")) == CANARY
    assert read_below(link, str(folder / "dog.png")) == CANARY
    assert read_below(link, "dog.png") == CANARY


HIDDEN = [
    "missing.png", "../secret.png", "deep/../dog.png", "deep/../../secret.png", "out.png", "in.png", "loop.png",
    "outside/secret.png",
    "fifo.png", "socket.png", "deep", ".", "..", "", "/", "//", "dog.png/x", "sparse.png",
    "/etc/passwd", "/proc/self/environ", "/proc/self/mem", "/dev/zero", "/dev/stdin", "//etc/passwd", "~/.ssh/id_rsa",
    "~root",
    "dog.png\0", "\0", "a" * 300, "a/" * 2000, "a" * 10**6, "\ud800.png", "\udcff", "%2e%2e/secret.png",
    "..\\secret.png",
    "file:///etc/passwd", "outside/../../secret.png",
]  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN, ids=range(len(HIDDEN)))
def test_nothing_else_is(folder, name):
    assert read_below(folder, name) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read it")
def test_a_file_that_the_server_may_not_read_is_not_there(folder):
    assert read_below(folder, "unreadable.png") is None


def test_a_device_is_not_read(folder):
    try:
        os.mknod(folder / "zero.png", 0o20666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("needs root")
    assert read_below(folder, "zero.png") is None


def test_a_file_beside_the_folder_whose_name_begins_the_same_is_not_below_it(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "rootless.png").write_bytes(CANARY)
    assert read_below(tmp_path / "root", str(tmp_path / "rootless.png")) is None


def test_a_file_that_becomes_a_pipe_after_the_look_does_not_block(folder, monkeypatch):
    real = os.stat

    def stat_then_exchange(path, *arguments, **options):
        found = real(path, *arguments, **options)
        if path == "dog.png":
            (folder / "dog.png").unlink()
            os.mkfifo(folder / "dog.png")
        return found

    monkeypatch.setattr("tureen.files.os.stat", stat_then_exchange)
    assert read_below(folder, "dog.png") is None


def test_a_folder_that_becomes_a_link_after_the_look_leads_nowhere(folder, monkeypatch):
    real = os.open

    def exchange_then_open(path, *arguments, **options):
        if path == "er":
            (folder / "deep" / "er").rename(folder / "deep" / "was")
            (folder / "deep" / "er").symlink_to(folder.parent)
        return real(path, *arguments, **options)

    monkeypatch.setattr("tureen.media.files.os.open", exchange_then_open)
    assert read_below(folder, "deep/er/secret.png") is None


def test_no_descriptor_stays_open(folder):
    before = len(os.listdir("/proc/self/fd"))
    for name in ("dog.png", "deep/er/ü cat.png", *HIDDEN):
        read_below(folder, name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_missing_and_forbidden_have_the_same_answer(folder, make_studio):
    studio = make_studio(media_path=folder)
    answers = set()
    for name in [name for name in HIDDEN if "." in name or name.startswith("/")]:
        with pytest.raises(Forbidden) as error:
            studio.load(name)
        answers.add((error.value.message, error.value.code, error.value.status, error.value.field))
    [(message, code, status, field)] = answers
    assert (code, status, field) == ("local_media_disabled", 403, "image_data")
    assert str(folder) not in message
    with pytest.raises(Forbidden) as error:
        studio.load(f"file://{folder.parent}/secret.png")
    assert error.value.message == message


def test_a_picture_below_the_folder_is_loaded_by_name_and_by_file_url(folder, make_studio):
    (folder / "red dot.png").write_bytes(stored(Image.new("RGB", (16, 8), "red")))
    studio = make_studio(media_path=folder)
    for name in ("red dot.png", str(folder / "red dot.png"), f"file://{folder}/red%20dot.png"):
        [prepared] = studio.load(name)
        assert prepared.pixels.shape == (1, 8, 16, 3)
        assert (prepared.pixels == [255, 0, 0]).all()


def test_without_a_folder_no_file_is_looked_at(folder, make_studio, monkeypatch):
    monkeypatch.setattr("tureen.media.loader.read_below", lambda *_: pytest.fail("it looked"))
    monkeypatch.chdir(folder)
    for name in ("dog.png", str(folder / "dog.png"), "file:dog.png", "missing.png"):
        with pytest.raises(Forbidden, match="reads no files") as error:
            make_studio().load(name)
        assert error.value.code == "local_media_disabled"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_the_folder_is_the_current_one_where_only_this_machine_reaches_the_server(host, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert media_root(None, host) == tmp_path
    monkeypatch.chdir("/")
    assert media_root(None, host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_there_is_none_where_others_reach_it_unless_it_is_given(host, tmp_path):
    assert media_root(None, host) is None
    assert media_root(str(tmp_path), host) == tmp_path
    assert media_root("", host) is None


def test_a_folder_that_is_not_there_ends_the_start(tmp_path):
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(StartupError, match="--media-path"):
            media_root(str(tmp_path / name), "127.0.0.1")
    assert media_root(os.path.relpath(tmp_path), "127.0.0.1") == Path.cwd() / os.path.relpath(tmp_path)
