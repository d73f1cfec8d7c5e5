"""The whole way from strings to prepared pixels: what goes wrong in one harms no other."""

from __future__ import annotations

import asyncio
import queue
import re

import inline_workers
import msgspec
import numpy as np
import plain_family as double
import pytest
from PIL import Image
from stored_pictures import base64_of, stored
from timeouts import PATIENCE_S

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


def test_pixels_tokens_and_layout_are_what_the_family_made(studio):
    picture = picture_of(40, 30)
    for text in (base64_of(stored(picture)), f"data:image/jpeg;base64,{base64_of(stored(picture))}"):
        [prepared] = studio.load(text)
        assert np.array_equal(prepared.pixels, np.asarray(picture)[None])
        assert prepared.pixels.dtype == np.uint8
        assert prepared.num_tokens == 5
        assert prepared.layout == (40, 30)


@pytest.mark.parametrize(("size", "expected"), [((64, 32), (64, 32)), ((640, 320), (64, 32)), ((4, 800), (3, 640))])
def test_pictures_with_more_pixels_than_the_operator_allows_are_reduced_in_proportion(make_studio, size, expected):
    [prepared] = make_studio(max_pixels=2048).load(base64_of(stored(Image.new("RGB", size, "red"))))
    height, width = prepared.pixels.shape[1:3]
    assert (width, height) == expected
    assert (prepared.pixels == (255, 0, 0)).all()


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
        ("AAA", "is not valid base64"),
        ("data:;base64,AA=A", "is not valid base64"),
        ("A" * 5000 + "!" * 4, "is not valid base64"),
        ("A" * 5000 + "ü", "is not valid base64"),
        ("data:image/png;base64,%41%41", "is not valid base64"),
        ("AAAA", "is not a PNG"),
        (base64_of(b"<svg/>" * 20), "is not a PNG"),
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


def test_pictures_that_are_too_large_together_as_the_model_takes_them_are_refused(studio, monkeypatch):
    monkeypatch.setattr("tureen.media.decode_worker.MAX_REPLY_BYTES", 2 * 3 * 40 * 20)
    assert len(studio.load(encoded(40), encoded(40))) == 2
    assert "send fewer" in failure(studio, encoded(40), encoded(40), encoded(8)).message


def test_a_fault_of_the_family_is_an_internal_error_without_what_it_says(studio):
    error = failure(studio, encoded(double.FAULT), error=RequestFailed)
    assert "KeyError in plain_family.py:" in error.message
    assert "no place in this model" in failure(studio, encoded(double.REFUSE)).message


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
    with pytest.raises(RequestFailed, match="invalid answer"):
        loader_module._checked(reply, "image", "image_data", 1)


def test_a_fork_server_that_cannot_start_is_an_error_of_the_server(make_studio):
    studio = make_studio()
    studio.loader.supervisor.can_start = False
    assert "no process" in failure(studio, encoded(40), error=RequestFailed).message


def test_a_picture_that_ends_its_process_fails_alone(studio):
    async def both():
        bad = asyncio.ensure_future(studio.loader.load([encoded(double.END)], "image", "image_data"))
        good = [await studio.loader.load([encoded(40)], "image", "image_data") for _ in range(3)]
        [error] = await asyncio.gather(bad, return_exceptions=True)
        return error, good

    error, good = studio.run(both())
    assert isinstance(error, InvalidRequest)
    assert error.code == "invalid_image"
    assert "memory" in error.message
    assert [one.layout for [one] in good] == [(40, 20)] * 3


@pytest.fixture
def waiting(monkeypatch):
    """The workers that hold a picture of the width WAIT, as they begin."""
    begun = queue.Queue()

    def wait():
        begun.put(inline_workers.at_work())
        inline_workers.wait_until_lost()

    monkeypatch.setitem(double.ACTIONS, double.WAIT, wait)
    return begun


def next_of(waiting):
    return asyncio.to_thread(waiting.get, timeout=PATIENCE_S)


def test_a_picture_whose_process_is_killed_from_outside_is_decoded_by_another_one(studio, waiting):
    async def load_and_kill():
        loading = asyncio.ensure_future(studio.loader.load([encoded(double.WAIT)], "image", "image_data"))
        for _ in range(loader_module.MAX_ATTEMPTS):
            (await next_of(waiting)).lose(inline_workers.ended_from_outside)
        with pytest.raises(Unavailable, match="killed") as caught:
            await loading
        return caught.value

    error = studio.run(load_and_kill())
    assert (error.status, error.code) == (503, "media_worker_lost")
    assert studio.load(encoded(40))[0].layout == (40, 20)


def test_a_fork_server_that_ends_costs_no_request(make_studio, waiting, monkeypatch):
    studio = make_studio()

    async def load_and_end():
        loading = asyncio.ensure_future(studio.loader.load([encoded(double.WAIT)], "image", "image_data"))
        await next_of(waiting)
        monkeypatch.delitem(double.ACTIONS, double.WAIT)
        studio.loader.supervisor.end_fork_server()
        return await loading

    [prepared] = studio.run(load_and_end())
    assert prepared.layout == (double.WAIT, 20)


def test_a_client_that_goes_away_frees_no_place_before_its_process_has_ended(make_studio, waiting, monkeypatch):
    monkeypatch.setattr(loader_module, "MAX_WAIT_S", 0.0)
    studio = make_studio()

    async def leave_and_come_back():
        loads = [asyncio.ensure_future(studio.loader.load([encoded(double.WAIT)], "image", "a")) for _ in range(2)]
        workers = [await next_of(waiting) for _ in loads]
        for one in loads:
            one.cancel()
        with pytest.raises(Unavailable) as error:
            await studio.loader.load([encoded(40)], "image", "image_data")
        assert error.value.code == "media_queue_full"
        monkeypatch.setattr(loader_module, "MAX_WAIT_S", PATIENCE_S)
        for worker in workers:
            worker.lose(inline_workers.ended_by_itself)
        return await studio.loader.load([encoded(40)], "image", "image_data")

    [prepared] = studio.run(leave_and_come_back())
    assert prepared.layout == (40, 20)


def test_closing_ends_what_is_under_way(make_studio, waiting):
    studio = make_studio()

    async def close_amid():
        load = asyncio.ensure_future(studio.loader.load([encoded(double.WAIT)], "image", "image_data"))
        await next_of(waiting)
        await studio.loader.close()
        [error] = await asyncio.gather(load, return_exceptions=True)
        return error

    assert isinstance(studio.run(close_amid()), TureenError)
    assert studio.loader.supervisor.workers == []


def test_nothing_is_started_before_the_first_picture(make_studio):
    assert make_studio().loader.supervisor.condition == "off"


def test_many_at_once_all_get_their_own(studio):
    async def all_at_once():
        widths = range(16, 56)
        loads = [studio.loader.load([encoded(width)], "image", "image_data") for width in widths]
        return [one.layout[0] for [one] in await asyncio.gather(*loads)] == list(widths)

    assert studio.run(all_at_once())


def test_a_model_that_takes_no_pictures_is_named():
    with pytest.raises(StartupError, match="model_type llama"):
        find_family({"model_type": "llama"}, {})
