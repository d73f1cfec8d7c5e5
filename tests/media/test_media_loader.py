"""The whole way from strings to prepared pixels, in real processes: what goes wrong in one harms no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import decode_double as double
import msgspec
import numpy as np
import pytest
import tiny_llava
from patience import PATIENCE_S, until, wait_until
from PIL import Image
from stored_pictures import base64_of, stored

from tureen.errors import InvalidRequest, RequestFailed, StartupError, TureenError, Unavailable
from tureen.media import loader as loader_module
from tureen.media.families import find_family
from tureen.media.references import MAX_BYTES
from tureen.media.wire import DecodeReply, Item

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


def test_pixels_tokens_and_layout_are_what_the_family_made(studio):
    picture = picture_of(40, 30)
    for text in (base64_of(stored(picture)), f"data:image/jpeg;base64,{base64_of(stored(picture))}"):
        [prepared] = studio.load(text)
        assert np.array_equal(prepared.pixels, np.asarray(picture)[None])
        assert prepared.pixels.dtype == np.uint8
        assert prepared.num_tokens == 5
        assert prepared.layout == (40, 30)


def test_several_pictures_come_back_in_their_order(studio):
    found = studio.load(*(encoded(width) for width in (16, 64, 24)), modality="multi-images")
    assert [one.layout for one in found] == [(16, 20), (64, 20), (24, 20)]


MODES = {
    "JPEG": ("RGB", "L", "CMYK", "1"),
    "PNG": ("RGB", "L", "P", "RGBA", "LA", "1", "I;16"),
    "GIF": ("RGB", "L", "P", "RGBA", "LA", "1"),
    "WEBP": ("RGB", "L", "P", "RGBA"),
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_every_format_and_mode_is_decoded_where_no_file_can_be_opened(studio, kind, mode):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = picture_of(40, 30).convert("L" if mode == "I;16" else mode).convert(mode)
    [prepared] = studio.load(base64_of(stored(picture, kind, exif=exif)))
    assert prepared.layout == ((40, 30) if kind == "GIF" else (30, 40))


def test_a_picture_of_a_camera_with_two_in_one_file_is_its_first(studio):
    data = stored(picture_of(40), "MPO", save_all=True, append_images=[picture_of(48)])
    assert studio.load(base64_of(data))[0].layout == (40, 20)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("AAA", "no valid base64"),
        ("data:;base64,AA=A", "no valid base64"),
        ("A" * 5000 + "!" * 4, "no valid base64"),
        ("A" * 5000 + "ü", "no valid base64"),
        ("data:image/png;base64,%41%41", "no valid base64"),
        ("AAAA", "none of PNG"),
        (base64_of(b"<svg/>" * 20), "none of PNG"),
        (base64_of(stored(picture_of(30))[:400]), "damaged"),
        (base64_of(bytes(MAX_BYTES + 1)), "20 MiB"),
        (base64_of(stored(picture_of(1, 300))), "200 times"),
    ],
    ids=range(10),
)
def test_what_is_no_picture_is_refused_with_its_reason_and_place(studio, text, why):
    error = failure(studio, text)
    assert why in error.message
    assert error.field == "image_data"
    error = failure(studio, encoded(16), text, field="image_data[7]")
    assert why in error.message
    assert error.field == "image_data[7][1]"
    assert error.message.startswith("image_data[7][1] ")


def test_base64_with_line_breaks_and_of_exactly_the_limit_is_taken(studio):
    text = encoded(40)
    assert studio.load("\r\n".join(text[start : start + 76] for start in range(0, len(text), 76)))
    data = stored(picture_of(40))
    assert studio.load(base64_of(data + bytes(MAX_BYTES - len(data))))[0].layout == (40, 20)


def test_too_many_pictures_or_bytes_for_a_prompt_are_refused(studio, monkeypatch):
    assert "64" in failure(studio, *["AAAA"] * 65).message
    failure(studio)
    monkeypatch.setattr(loader_module, "MAX_PROMPT_BYTES", 5000)
    assert "in all" in failure(studio, *[encoded(40)] * 3).message


def test_a_process_has_no_files_sockets_children_signals_or_environment(studio):
    assert "could do [] with 0 variables" in failure(studio, encoded(double.ESCAPE)).message


@pytest.mark.parametrize("width", [double.SPIN, double.SLEEP, double.CRASH, double.EXIT, double.TAKE_MEMORY])
def test_a_picture_that_ends_its_process_fails_alone(studio, width):
    async def both():
        bad = asyncio.ensure_future(studio.loader.load([encoded(width)], "image", "image_data"))
        good = [await studio.loader.load([encoded(40)], "image", "image_data") for _ in range(3)]
        [error] = await asyncio.gather(bad, return_exceptions=True)
        return error, good

    error, good = studio.run(both())
    assert isinstance(error, InvalidRequest)
    assert error.code == "invalid_image"
    assert "memory" in error.message
    assert [one.layout for [one] in good] == [(40, 20)] * 3
    assert studio.load(encoded(40))


def test_a_fault_of_the_family_is_an_internal_error_without_what_it_says(studio):
    error = failure(studio, encoded(double.FAULT), error=RequestFailed)
    assert "KeyError in decode_double.py:" in error.message
    assert "no place in this model" in failure(studio, encoded(double.REFUSE)).message


def test_a_process_that_was_taken_over_cannot_make_the_front_believe_it(studio):
    failure(studio, encoded(double.LIE))
    assert studio.load(encoded(40))


@pytest.mark.parametrize(
    "reply",
    [
        b"", b"\xff" * 100, msgspec.msgpack.encode(DecodeReply()), msgspec.msgpack.encode([[], None, 5, 6]),
        msgspec.msgpack.encode({}),
        *(
            msgspec.msgpack.encode(DecodeReply((item,)))
            for item in (
                Item(bytes(16), (1, 2, 2, 4), 1, ()), Item(bytes(11), (1, 2, 2, 3), 1, ()),
                Item(bytes(12), (-1, -2, 2, 3), 1, ()),
                Item(b"", (0, 2, 2, 3), 1, ()), Item(bytes(12), (1, 2, 2, 3), 0, ()),
                Item(bytes(12), (1, 2, 2, 3), -5, ()),
                Item(bytes(12), (1, 2, 2, 3), 1 << 40, ()), Item(bytes(12), (1 << 40, 1 << 40, 1, 3), 1, ()),
            )
        ),
        msgspec.msgpack.encode(DecodeReply((Item(bytes(12), (1, 2, 2, 3), 1, ()),) * 2)),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_reply_that_makes_no_sense_is_none(reply):
    with pytest.raises(RequestFailed, match="nonsense"):
        loader_module._checked(reply, "image", "image_data", 1)


def test_nothing_is_left_of_large_pictures(make_studio):
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_is_killed_or_stopped_costs_no_request(make_studio, number):
    studio = make_studio()
    assert studio.load(encoded(40))
    for _ in range(2):
        before = studio.loader.supervisor.pid
        os.kill(before, number)
        assert studio.load(encoded(40))[0].layout == (40, 20)
        wait_until(lambda pid=before: not is_alive(pid), "it is not replaced")


def test_a_picture_whose_process_is_killed_from_outside_is_decoded_by_another_one(make_studio, monkeypatch):
    monkeypatch.setattr("tureen.sandbox.worker.STATUS_TIMEOUT_S", PATIENCE_S)
    studio = make_studio()
    assert studio.load(encoded(40))
    killed = []

    def at_work():
        return {worker.pid for worker in studio.loader.supervisor.workers if worker.has_begun} - set(killed)

    async def load_and_kill():
        loading = asyncio.ensure_future(studio.loader.load([encoded(double.SLEEP)], "image", "image_data"))
        for _ in range(loader_module.MAX_ATTEMPTS):
            await until(at_work, "another one", unless=loading)
            killed.extend(at_work())
            os.kill(killed[-1], signal.SIGKILL)
        with pytest.raises(Unavailable, match="ended from outside") as caught:
            await loading
        return caught.value

    error = studio.run(load_and_kill())
    assert (error.status, error.code) == (503, "media_worker_lost")
    assert studio.load(encoded(40))[0].layout == (40, 20)


def test_a_fork_server_that_cannot_start_is_an_error_of_the_server(make_studio, monkeypatch):
    monkeypatch.setattr(loader_module, "PROGRAM", "tureen.no_such_program")
    monkeypatch.setattr(loader_module, "START_TIMEOUT_S", 1.0)
    assert "no process" in failure(make_studio(), encoded(40), error=RequestFailed).message


def test_a_client_that_goes_away_frees_no_place_before_its_process_has_ended(make_studio, monkeypatch):
    monkeypatch.setattr(loader_module, "MAX_WAIT_S", 0.2)
    studio = make_studio()

    async def leave_and_come_back():
        loads = [asyncio.ensure_future(studio.loader.load([encoded(double.SLEEP)], "image", "a")) for _ in range(2)]
        await until(lambda: studio.loader.supervisor.pid and len(children_of(studio.loader.supervisor.pid)) == 2)
        for one in loads:
            one.cancel()
        with pytest.raises(Unavailable) as error:
            await studio.loader.load([encoded(40)], "image", "image_data")
        assert error.value.code == "media_queue_full"
        monkeypatch.setattr(loader_module, "MAX_WAIT_S", 60.0)
        return await studio.loader.load([encoded(40)], "image", "image_data")

    [prepared] = studio.run(leave_and_come_back())
    assert prepared.layout == (40, 20)


def test_many_at_once_all_get_their_own(studio):
    async def all_at_once():
        widths = range(16, 56)
        loads = [studio.loader.load([encoded(width)], "image", "image_data") for width in widths]
        return [one.layout[0] for [one] in await asyncio.gather(*loads)] == list(widths)

    assert studio.run(all_at_once())


def test_closing_ends_all_processes_and_what_is_under_way(make_studio):
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


def test_the_front_needs_no_pillow_and_starts_nothing_before_the_first_picture(make_studio):
    assert make_studio().loader.supervisor.condition == "off"
    code = "import sys, tureen.media.loader; sys.exit(any(name in sys.modules for name in ('PIL', 'torch', 'av')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("variant", "modality"), [("llava-clip", "image"), ("onevision", "video")])
def test_families_of_the_house_work_where_no_file_can_be_opened(tmp_path, make_studio, monkeypatch, variant, modality):
    tiny_llava.write(tmp_path, variant)
    hf = json.loads((tmp_path / "config.json").read_text())
    preprocessor = tiny_llava.PREPROCESSORS[variant]
    pictures = [picture_of(90, 70) for _ in range(1 if modality == "image" else 3)]
    monkeypatch.setattr(loader_module, "PROGRAM", "tureen.media.decode_worker")
    monkeypatch.setattr(loader_module, "find_family", find_family)
    found = make_studio(hf=hf, preprocessor=preprocessor).load(
        *map(base64_of, map(stored, pictures)), modality=modality
    )
    for one, expected in zip(found, find_family(hf, preprocessor).prepare(pictures, modality), strict=True):
        assert np.array_equal(one.pixels, expected.pixels)
        assert one[1:] == expected[1:]


def test_a_model_that_takes_no_pictures_is_named():
    with pytest.raises(StartupError, match="model_type llama"):
        find_family({"model_type": "llama"}, {})
