"""Pictures are decoded in real processes: sealed ones, which end, and are replaced where they are killed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
from pathlib import Path

import decode_double as double
import numpy as np
import pytest
import tiny_idefics3
import tiny_llava
from PIL import Image
from stored_pictures import base64_of, stored
from timeouts import until, wait_until

from tureen.errors import InvalidRequest, TureenError
from tureen.media import loader as loader_module
from tureen.media.families import find_family
from tureen.media.loader import MediaLoader

LEAKS = re.compile(r"0x[0-9a-f]{6,}|/usr/|/home/|/tmp/|File \"|Traceback|object at|secret")
RNG = np.random.default_rng(3)


def picture_of(width, height=20):
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(width, kind="PNG", **options):
    return base64_of(stored(picture_of(width), kind, **options))


def failure(studio, *references, error=InvalidRequest, **options):
    with pytest.raises(error) as caught:
        studio.load(*references, **options)
    assert not LEAKS.search(caught.value.message)
    assert len(caught.value.message) < 400
    if error is InvalidRequest:
        assert (caught.value.status, caught.value.code) == (400, "invalid_image")
    return caught.value


def children_of(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[1][0] != "Z"
    return False


DOUBLE = str(Path(__file__).with_name("decode_double.py"))


class Studio:
    """A loader with an event loop of its own, which goes on between calls."""

    def __init__(self, hf=None, preprocessor=None):
        self._runner = asyncio.Runner()
        self.loader = MediaLoader(hf or {}, preprocessor or {}, media_path=None, allowed_domains=())

    def run(self, coroutine):
        return self._runner.run(coroutine)

    def load(self, *references, modality="image", field="image_data"):
        return self.run(self.loader.load(references, modality, field))

    def close(self):
        self._runner.run(self.loader.close())
        self._runner.close()


@pytest.fixture(scope="module")
def plain_family():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tureen.media.loader.PROGRAM", DOUBLE)
        patch.setattr("tureen.media.loader.LIMITS", loader_module.LIMITS._replace(cpu_s=1))  # granted with each picture
        patch.setattr("tureen.media.loader.find_family", lambda hf, preprocessor: double.PlainFamily())
        yield


@pytest.fixture(scope="module")
def studio(plain_family):
    made = Studio()
    yield made
    made.close()


@pytest.fixture
def make_studio(plain_family):
    """Others, closed at the end."""
    made = []

    def make(**options):
        made.append(Studio(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


MODES = {
    "JPEG": ("RGB", "L", "CMYK", "1"),
    "PNG": ("RGB", "L", "P", "RGBA", "LA", "1", "I;16"),
    "GIF": ("RGB", "L", "P", "RGBA", "LA", "1"),
    "WEBP": ("RGB", "L", "P", "RGBA"),
}


def test_pictures_are_decoded_in_processes_that_may_do_nothing_and_fail_alone(studio):
    every_format_and_mode_is_decoded_where_no_file_can_be_opened(studio)
    a_process_has_no_files_sockets_children_signals_or_environment(studio)
    a_picture_that_ends_its_process_fails_alone(studio)
    a_process_that_was_taken_over_cannot_make_the_front_believe_it(studio)


def every_format_and_mode_is_decoded_where_no_file_can_be_opened(studio):
    exif = Image.Exif()
    exif[0x0112] = 6
    wrong = []
    for kind, mode in [(kind, mode) for kind, modes in MODES.items() for mode in modes]:
        picture = picture_of(40, 30).convert("L" if mode == "I;16" else mode).convert(mode)
        [prepared] = studio.load(base64_of(stored(picture, kind, exif=exif)))
        if prepared.layout != ((40, 30) if kind == "GIF" else (30, 40)):
            wrong.append((kind, mode))
    assert wrong == []


def a_process_has_no_files_sockets_children_signals_or_environment(studio):
    assert "could do [] with 0 variables" in failure(studio, encoded(double.ESCAPE)).message


ENDING = (double.SPIN, double.SLEEP, double.CRASH, double.EXIT, double.TAKE_MEMORY)


def a_picture_that_ends_its_process_fails_alone(studio):
    async def all_together():
        bad = [asyncio.ensure_future(studio.loader.load([encoded(width)], "image", "image_data")) for width in ENDING]
        good = [await studio.loader.load([encoded(40)], "image", "image_data") for _ in range(3)]
        return await asyncio.gather(*bad, return_exceptions=True), good

    errors, good = studio.run(all_together())
    told = {
        width: (getattr(error, "code", error), "memory" in str(error))
        for width, error in zip(ENDING, errors, strict=True)
    }
    assert told == dict.fromkeys(ENDING, ("invalid_image", True))
    assert [one.layout for [one] in good] == [(40, 20)] * 3
    assert studio.load(encoded(40))


def a_process_that_was_taken_over_cannot_make_the_front_believe_it(studio):
    failure(studio, encoded(double.LIE))
    assert studio.load(encoded(40))


def test_a_fork_server_keeps_nothing_costs_no_request_when_it_is_lost_and_ends_when_it_is_closed(make_studio):
    nothing_is_left_of_large_pictures(make_studio)
    a_fork_server_that_is_killed_or_stopped_costs_no_request(make_studio)
    closing_ends_all_processes_and_what_is_under_way(make_studio)


def nothing_is_left_of_large_pictures(make_studio):
    studio = make_studio()
    assert studio.load(encoded(40))
    fork_server = studio.loader.supervisor.pid
    wait_until(lambda: not children_of(fork_server), "a process outlives its picture")
    before, files = resident_bytes(fork_server), len(os.listdir(f"/proc/{fork_server}/fd"))
    large = base64_of(stored(Image.new("RGB", (3000, 2000), "red")))
    for _ in range(3):
        assert studio.load(large)[0].layout == (3000, 2000)
        failure(studio, encoded(double.CRASH))
    wait_until(lambda: not children_of(fork_server), "a process outlives its picture")
    assert resident_bytes(fork_server) < before + (4 << 20)
    wait_until(lambda: len(os.listdir(f"/proc/{fork_server}/fd")) <= files, "a file stays open")


def a_fork_server_that_is_killed_or_stopped_costs_no_request(make_studio):
    studio = make_studio()
    assert studio.load(encoded(40))
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        before = studio.loader.supervisor.pid
        os.kill(before, number)
        assert studio.load(encoded(40))[0].layout == (40, 20)
        wait_until(lambda pid=before: not is_alive(pid), "it is not replaced")


def closing_ends_all_processes_and_what_is_under_way(make_studio):
    studio = make_studio()

    async def close_amid():
        load = asyncio.ensure_future(studio.loader.load([encoded(double.SLEEP)], "image", "image_data"))
        await until(lambda: studio.loader.supervisor.pid and children_of(studio.loader.supervisor.pid))
        pid = studio.loader.supervisor.pid
        pids = [pid, *children_of(pid)]
        await studio.loader.close()
        [error] = await asyncio.gather(load, return_exceptions=True)
        return pids, error

    pids, error = studio.run(close_amid())
    assert isinstance(error, TureenError)
    wait_until(lambda: not any(map(is_alive, pids)), "a process outlives the loader")


def test_families_of_the_house_work_where_no_file_can_be_opened(tmp_path, make_studio, monkeypatch):
    monkeypatch.setattr(loader_module, "PROGRAM", "tureen.media.decode_worker")
    monkeypatch.setattr(loader_module, "find_family", find_family)
    for writer, variant, modality in (
        (tiny_llava, "llava-clip", "image"),
        (tiny_llava, "onevision", "video"),
        (tiny_idefics3, "smolvlm", "image"),
    ):
        is_prepared_as_here(tmp_path, make_studio, writer, variant, modality)


def is_prepared_as_here(tmp_path, make_studio, writer, variant, modality):
    writer.write(tmp_path, variant)
    hf = json.loads((tmp_path / "config.json").read_text())
    preprocessor = writer.PREPROCESSORS[variant]
    pictures = [picture_of(90, 70) for _ in range(1 if modality == "image" else 3)]
    found = make_studio(hf=hf, preprocessor=preprocessor).load(
        *map(base64_of, map(stored, pictures)), modality=modality
    )
    for one, expected in zip(found, find_family(hf, preprocessor).prepare(pictures, modality), strict=True):
        assert np.array_equal(one.pixels, expected.pixels)
        assert one[1:] == expected[1:]


def pyav_film(av, codec, kind, count=100):
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as film:
        stream = film.add_stream(codec, rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 2 * index, np.uint8), format="rgb24")
            film.mux(stream.encode(frame))
        film.mux(stream.encode())
    return file.getvalue()


def test_with_pyav_frames_of_films_are_taken_in_the_process_that_may_do_nothing(studio):
    av = pytest.importorskip("av")
    expected = np.array([2 * (index * 99 // 31) for index in range(32)])
    for codec, kind in (("mpeg4", "mp4"), ("libx264", "mp4"), ("libvpx-vp9", "webm")):
        [prepared] = studio.load(base64_of(pyav_film(av, codec, kind)), modality="video", field="video_data")
        assert prepared.pixels.shape == (32, 48, 64, 3), codec
        assert np.abs(prepared.pixels.mean((1, 2, 3)) - expected).max() < 4, codec
