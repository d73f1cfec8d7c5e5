"""Which frames are taken of a film, and what films are refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from stored_pictures import base64_of, stored

from tureen.errors import InvalidRequest
from tureen.media import video
from tureen.media.decode import Refused
from tureen.media.video import MAX_FRAMES, frames, sampled

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


def grey_film(count, kind="GIF", size=(8, 6)):
    """Frame i is grey i."""
    made = [Image.new("L", size, index % 256) for index in range(count)]
    return stored(made[0], kind, save_all=True, append_images=made[1:], duration=50, lossless=True)


def greys(data):
    return [int(np.asarray(one)[0, 0, 0]) for one in frames(data)]


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 100, 9999])
def test_frames_are_taken_from_first_to_last_at_even_distances(count):
    taken = sampled(count)
    assert len(taken) == min(count, MAX_FRAMES)
    assert taken[0] == 0
    assert taken[-1] == count - 1
    ideal = [index * (count - 1) / max(1, len(taken) - 1) for index in range(len(taken))]
    assert all(0 <= exact - index < 1 for exact, index in zip(ideal, taken, strict=True))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_frames_of_an_animation_are_those_that_were_stored(kind):
    assert greys(grey_film(20, kind)) == list(range(20))
    expected = [index * 99 // 31 for index in range(32)]
    assert greys(grey_film(100, kind)) == expected


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "JPEG"])
def test_a_picture_that_does_not_move_is_a_film_of_one_frame(kind):
    [frame] = frames(stored(Image.new("RGB", (8, 6), "red"), kind))
    assert frame.size == (8, 6)
    assert frame.mode == "RGB"


def test_a_frame_that_covers_a_part_is_laid_over_the_one_before():
    first = Image.new("RGB", (16, 16), "red")
    second = first.copy()
    second.paste("blue", (4, 4, 8, 8))
    [_, found] = frames(stored(first, "GIF", save_all=True, append_images=[second]))
    assert np.array_equal(np.asarray(found), np.asarray(second))


FRAME = b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"


def gif(num_frames, size=b"\x01\0\x01\0", frame=FRAME):
    return b"GIF89a" + size + b"\x80\0\0" + b"\0\0\0\xff\xff\xff" + frame * num_frames + b";"


def test_a_hundred_thousand_frames_are_refused_without_being_decoded(monkeypatch):
    monkeypatch.setattr("PIL.GifImagePlugin.GifImageFile.load_end", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(Refused, match="100000 frames"):
        list(frames(gif(100_000)))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (gif(2000, b"\0\x04\0\x04"), "pixels"),  # 2000 frames of 1024 x 1024
        (gif(2, b"\xff\xff\xff\xff"), "pixels"),
        (gif(2, b"\x01\0\xff\xff"), "a side"),
        (gif(1) [:-1] + FRAME[:5] + b"\xff\xff\xff\x7f" + FRAME[9:] + b";", "pixels"),  # the second frame is larger
        (b"no film", "is not an MP4"),
        (b"", "is not an MP4"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "is not an MP4"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "is not an MP4"),
        (grey_film(10, "WEBP")[:-30], "damaged"),
    ],
    ids=range(9),
)  # fmt: skip
def test_films_that_are_too_much_or_none_are_refused(data, why):
    with pytest.raises(Refused, match=why):
        list(frames(data))


def test_an_animation_that_claims_more_frames_than_it_has_is_damaged():
    data = grey_film(4, "PNG")
    at = data.index(b"acTL") + 4
    with pytest.raises(Refused, match="damaged"):
        list(frames(data[:at] + (9).to_bytes(4, "big") + data[at + 4 :]))


@pytest.mark.skipif(video.av is not None, reason="PyAV is there")
@pytest.mark.parametrize("head", [b"\0\0\0\x18ftypisom", b"\x1aE\xdf\xa3"])
def test_without_pyav_a_film_says_what_would_read_it(head):
    with pytest.raises(Refused, match=r"MP4 or WebM.*'video'"):
        list(frames(head + bytes(100)))


def test_one_film_becomes_one_item_with_its_frames(studio):
    [prepared] = studio.load(base64_of(grey_film(40)), modality="video", field="video_data")
    assert prepared.pixels.shape == (32, 6, 8, 3)
    assert prepared.pixels[:, 0, 0, 0].tolist() == [index * 39 // 31 for index in range(32)]
    assert prepared.layout == (32,)


def test_a_list_of_pictures_is_a_film_with_exactly_these_frames(studio):
    pictures = [base64_of(stored(Image.new("RGB", (8, 6), (index, 0, 0)))) for index in range(40)]
    [prepared] = studio.load(*pictures, modality="video", field="video_data")
    assert prepared.pixels[:, 0, 0, 0].tolist() == list(range(40))


def test_a_model_without_films_refuses_them(make_studio, monkeypatch):
    studio = make_studio()
    monkeypatch.setattr(studio.loader.family, "video_placeholder", None, raising=False)
    with pytest.raises(InvalidRequest, match="takes no videos") as error:
        studio.load(base64_of(grey_film(3)), modality="video", field="video_data")
    assert error.value.field == "video_data"
