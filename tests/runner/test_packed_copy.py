"""Packed weights kept on disk: the next start has the same bytes, and nothing that is wrong with a file stops it."""

import os
import resource
import shutil
import stat

import pytest
from runner_driver import folder_source
from tiny_models import write

from tureen.config import Config
from tureen.runner import native, packed_copy
from tureen.runner.load import load_runner

pytest.importorskip("tureen.kernels.cpu._native")
FRESH, COPY = "load weights", "load weights (packed copy)"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2")
    write(folder, "qwen2")  # has biases: vectors that are not norms
    return folder


class Server:
    """Starts again and again: `weights` are those of the last start, `phases` what it went through."""

    def __init__(self, tmp_path, original, monkeypatch, caplog):
        self.model = shutil.copytree(original, tmp_path / "model")
        self.cache = tmp_path / "cache"
        self.folder = self.cache / "packed"
        self.weights, self.phases = {}, set()
        self._caplog, record = caplog, native.record
        monkeypatch.setattr(native, "LEAST_BYTES", 0)

        def recording(tape, model, *rest):
            self.weights = {
                name: (getattr(weight, "format", "array"), packed_copy.bytes_of(weight).tobytes())
                for name, weight in rest[-1].items()
            }
            record(tape, model, *rest)

        monkeypatch.setattr(native, "record", recording)

    def start(self, **settings):
        """The warnings."""
        self._caplog.clear()
        self.weights, self.phases = {}, set()
        config = {"device": "cpu", "num_threads": 2, "max_total_tokens": 512, "download_dir": str(self.cache)}
        load_runner(
            folder_source(self.model),
            Config(**(config | {"quantization": "int4"} | settings)),
            progress=lambda phase, done, total: self.phases.add(phase),
        )
        return [record.getMessage() for record in self._caplog.records if record.levelname == "WARNING"]

    def copies(self):
        return sorted(self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture
def server(tmp_path, original, monkeypatch, caplog):
    return Server(tmp_path, original, monkeypatch, caplog)


@pytest.mark.parametrize(
    "settings", [{"quantization": "int4"}, {"quantization": "int8"}, {"quantization": "int8", "num_threads": 1}]
)
def test_the_second_start_reads_the_bytes_that_the_first_one_packed(server, settings):
    assert server.start(**settings) == []
    packed, phases = server.weights, server.phases
    assert server.start(**settings) == []
    assert (phases, server.phases) == ({FRESH}, {COPY})
    assert server.weights == packed
    assert {"Q8_ROW", "array"} <= {kind for kind, _ in packed.values()}


def test_a_copy_is_for_its_owner_alone(server):
    server.start()
    (copy,) = server.copies()
    assert copy.stat().st_mode & 0o777 == 0o600
    assert server.folder.stat().st_mode & 0o777 == 0o700


def test_other_settings_have_copies_of_their_own(server):
    server.start(quantization="int4")
    server.start(quantization="int8")
    assert server.phases == {FRESH}
    server.start(quantization="int4")
    assert server.phases == {COPY}
    assert len(server.copies()) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_that_was_changed_is_packed_again(server, name):
    server.start()
    status = (server.model / name).stat()
    os.utime(server.model / name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    (warning,) = server.start()
    assert "it was made from other files, or by another version" in warning
    assert server.phases == {FRESH}
    assert server.start() == []
    assert server.phases == {COPY}


def _without_end(data):
    return data[:-1]


def _with_one_more(data):
    return data + b"\0"


def _empty(data):
    return b""


def _other_version(data):
    return data.replace(b"tureen packed 1\n", b"tureen packed 0\n", 1)


def _zeros(data):
    return bytes(len(data))


def _header_flipped(data):
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def _endless_header(data):
    return data[:16] + b"\xff" * 8 + data[24:]


def _last_weight_flipped(data):
    return data[:-1] + bytes([data[-1] ^ 0x80])


def _end_not_written(data):
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without_end, "cut short"),
        (_with_one_more, "too long"),
        (_empty, "not of this version"),
        (_other_version, "not of this version"),
        (_zeros, "not of this version"),
        (_header_flipped, "header is damaged"),
        (_endless_header, "header is damaged"),
        (_last_weight_flipped, "bytes changed after they were written"),
        (_end_not_written, "bytes changed after they were written"),
    ],
)
def test_a_damaged_copy_is_told_and_replaced(server, damage, reason):
    server.start()
    packed = server.weights
    (copy,) = server.copies()
    good = copy.read_bytes()
    copy.write_bytes(damage(good))
    (warning,) = server.start()
    assert str(copy) in warning
    assert reason in warning
    assert server.weights == packed
    assert copy.read_bytes() == good


def _make_writable(copy):
    copy.chmod(0o620)


def _make_link(copy):
    copy.rename(copy.with_name("elsewhere"))
    copy.symlink_to("elsewhere")


def _make_socket(copy):
    copy.unlink()
    os.mknod(copy, stat.S_IFSOCK | 0o600)


def _make_pipe(copy):
    copy.unlink()
    os.mkfifo(copy)


def _make_foreign(copy):
    os.chown(copy, 65534, 65534)


@pytest.mark.parametrize(
    "change",
    [
        _make_writable,
        _make_link,
        _make_socket,
        _make_pipe,
        pytest.param(_make_foreign, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")),
    ],
)
def test_a_file_that_somebody_else_may_have_written_is_not_read(server, change):
    server.start()
    packed = server.weights
    (copy,) = server.copies()
    change(copy)
    (warning,) = server.start()
    assert f"not using the packed copy {copy}" in warning
    assert (server.phases, server.weights) == ({FRESH}, packed)
    assert server.start() == []
    assert server.phases == {COPY}


@pytest.mark.parametrize("where", ["/proc", "a file"])
def test_a_cache_that_cannot_be_written_is_told_and_the_model_is_loaded(server, where):
    server.cache.write_text("")
    (warning,) = server.start(download_dir="/proc" if where == "/proc" else str(server.cache))
    assert "cannot keep packed weights in" in warning
    assert "--no-packed-cache" in warning
    assert server.weights


def test_a_disk_that_becomes_full_is_told_and_nothing_is_left_behind(server):
    server.start()
    (copy,) = server.copies()
    size = copy.stat().st_size
    copy.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        (warning,) = server.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot keep packed weights" in warning
    assert server.copies() == []


def test_a_disk_with_too_little_room_is_not_written_to(server, monkeypatch):
    usage = shutil.disk_usage(server.model)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (warning,) = server.start()
    assert "more than the disk has free" in warning
    assert server.copies() == []


@pytest.mark.parametrize(
    "settings",
    [{"packed_cache": False}, {"quantization": None}, {"load_format": "dummy"}, {"kernels": "torch"}],
    ids=["opted out", "nothing to fit", "random weights", "torch"],
)
def test_nothing_is_written_where_it_is_not_wanted_or_does_not_pay(server, settings):
    if "kernels" in settings:
        settings = settings | {"quantization": None}
    server.start(**settings)
    assert not server.cache.exists()


def test_nothing_is_written_for_a_small_model(server, monkeypatch):
    monkeypatch.setattr(native, "LEAST_BYTES", packed_copy.LEAST_BYTES)
    server.start()
    assert not server.cache.exists()


def test_a_copy_is_not_read_by_who_opted_out(server):
    server.start()
    server.start(packed_cache=False)
    assert server.phases == {FRESH}


def test_the_copies_used_last_are_kept_and_what_killed_writers_left_is_removed(server):
    server.start(quantization="int8")
    (oldest,) = server.copies()
    others = [server.folder / f"other-{i}.packed" for i in range(4)]
    left, recent = server.folder / ".left.part", server.folder / ".recent.part"
    now = oldest.stat().st_mtime
    for age, file in enumerate([*others, oldest]):
        file.touch()
        os.utime(file, (now - 1000 * (age + 1),) * 2)
    for file in (left, recent):
        file.touch()
    os.utime(left, (now - 7200,) * 2)
    server.start(quantization="int8")  # reads it: now it is the newest
    server.start(quantization="int4")
    assert set(server.copies()) >= {oldest, others[0], others[1], recent}
    assert len(server.copies()) == 5
    assert not left.exists()
