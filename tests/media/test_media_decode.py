"""T23: what becomes of pictures, well made and hostile. The oracles are numpy and the PNG specification."""

from __future__ import annotations

import io
import os
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from stored_pictures import stored

from tureen.media.decode import MAX_PIXELS, Refused, decode

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning", "ignore::UserWarning")

RNG = np.random.default_rng(7)
SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, COLOUR: 3, PALETTE: 1, GREY_ALPHA: 2, COLOUR_ALPHA: 4}


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(samples, depth, kind, **chunks):
    """samples: integers [height, width, channels] -> a file, with these chunks before the picture."""
    height, width, channels = samples.shape
    assert channels == CHANNELS[kind]
    if depth == 16:
        rows = samples.astype(">u2").tobytes()
        length = width * channels * 2
    else:
        bits = np.unpackbits(samples.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :].reshape(height, -1)
        packed = np.packbits(bits, axis=-1)
        rows, length = packed.tobytes(), packed.shape[1]
    lines = b"".join(b"\0" + rows[start : start + length] for start in range(0, height * length, length))
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    extra = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    return SIGNATURE + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def header_only(width, height):
    """A file that claims a size, and has next to nothing."""
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR, 0, 0, 0)
    return SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def pixels(data):
    picture = decode(data)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def refusal(data):
    with pytest.raises(Refused) as error:
        decode(data)
    message = str(error.value)
    assert len(message) < 200
    assert not re.search(r"0x[0-9a-f]{4,}|/usr/|/home/|File \"|Traceback|object at|<|BytesIO", message)
    return message


def random_picture(mode="RGB", size=(23, 17)):
    return Image.fromarray(RNG.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_pictures_come_out_as_they_were_stored(kind):
    picture = random_picture()
    assert np.array_equal(pixels(stored(picture, kind, lossless=True)), np.asarray(picture))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_jpeg_is_near_what_was_stored(options):
    picture = Image.linear_gradient("L").convert("RGB")
    found = pixels(stored(picture, "JPEG", quality=95, **options))
    assert np.abs(found.astype(int) - np.asarray(picture).astype(int)).max() < 6


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_grey_of_every_depth_spans_black_to_white(depth):
    samples = RNG.integers(0, 2**depth, (9, 13, 1))
    expected = samples >> 8 if depth == 16 else samples * 255 // (2**depth - 1)
    assert np.array_equal(pixels(png(samples, depth, GREY)), np.repeat(expected, 3, axis=2))


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_the_grey_that_is_transparent_becomes_white(depth):
    samples = RNG.integers(0, 2**depth, (9, 13, 1))
    samples[4, 4] = key = 2**depth * 2 // 3
    expected = samples >> 8 if depth == 16 else samples * 255 // (2**depth - 1)
    expected[samples == key] = 255
    found = pixels(png(samples, depth, GREY, tRNS=struct.pack(">H", key)))
    assert np.array_equal(found, np.repeat(expected, 3, axis=2))


@pytest.mark.parametrize("depth", [8, 16])
def test_the_colour_that_is_transparent_becomes_white(depth):
    samples = RNG.integers(0, 2**depth, (9, 13, 3))
    samples[2:5, 2:5] = samples[0, 0]
    expected = samples >> (depth - 8)
    expected[(samples == samples[0, 0]).all(axis=2)] = 255
    found = pixels(png(samples, depth, COLOUR, tRNS=struct.pack(">3H", *samples[0, 0])))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("kind", [GREY_ALPHA, COLOUR_ALPHA])
def test_what_is_half_transparent_is_laid_on_white(depth, kind):
    samples = RNG.integers(0, 2**depth, (9, 13, CHANNELS[kind]))
    eight = samples >> (depth - 8)
    colour, alpha = eight[..., :-1].astype(float), eight[..., -1:] / 255
    expected = np.broadcast_to(colour * alpha + 255 * (1 - alpha), (9, 13, 3))
    assert np.abs(pixels(png(samples, depth, kind)) - expected).max() <= 1


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_palette_and_its_transparency_are_applied(depth):
    count = 2**depth
    palette = RNG.integers(0, 256, (count, 3))
    alpha = RNG.integers(0, 256, count)
    samples = RNG.integers(0, count, (9, 13, 1))
    tables = {"PLTE": palette.astype(np.uint8).tobytes()}
    assert np.array_equal(pixels(png(samples, depth, PALETTE, **tables)), palette[samples[..., 0]])
    share = alpha[samples] / 255
    expected = palette[samples[..., 0]] * share + 255 * (1 - share)
    found = pixels(png(samples, depth, PALETTE, **tables, tRNS=alpha.astype(np.uint8).tobytes()))
    assert np.abs(found - expected).max() <= 1


def test_cmyk_is_turned_into_colours():
    ink = np.zeros((16, 16, 4), dtype=np.uint8)
    ink[:, :8] = [0, 255, 255, 0]
    found = pixels(stored(Image.fromarray(ink, "CMYK"), "JPEG", quality=100)).astype(int)
    assert np.abs(found[:, :7] - [255, 0, 0]).max() < 12
    assert np.abs(found[:, 9:] - 255).max() < 12


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    frames = [Image.new("RGB", (12, 10), colour) for colour in ("red", "lime", "blue")]
    data = stored(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert (pixels(data) == [255, 0, 0]).all()


def test_what_a_gif_leaves_open_is_white():
    picture = Image.new("P", (8, 8), 1)
    picture.putpalette([0, 0, 0, 200, 10, 10])
    picture.paste(0, (0, 0, 4, 8))
    found = pixels(stored(picture, "GIF", transparency=0))
    assert (found[:, :4] == 255).all()
    assert (found[:, 4:] == [200, 10, 10]).all()


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_the_orientation_that_a_camera_noted_is_applied(orientation, kind):
    blocks = np.kron(RNG.integers(0, 2, (2, 3, 1)) * 255, np.ones((16, 16, 3))).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = pixels(stored(Image.fromarray(blocks), kind, exif=exif, quality=100, lossless=True))
    expected = UPRIGHT[orientation](blocks)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() < 40


@pytest.mark.parametrize(
    "exif", [b"", b"Exif\0\0", b"Exif\0\0nonsense", b"Exif\0\0MM\0*\xff\xff\xff\xff", os.urandom(300)]
)
def test_broken_metadata_turn_nothing(exif):
    picture = random_picture()
    assert np.array_equal(pixels(stored(picture, "PNG", exif=exif)), np.asarray(picture))


SHORT, LONG, TEXT = (3, ">Hxx"), (4, ">I"), (2, ">cxxx")


@pytest.mark.parametrize(("kind", "value"), [(SHORT, 0), (SHORT, 9), (SHORT, 65535), (LONG, 2**31), (TEXT, b"6")])
def test_an_orientation_that_there_is_not_turns_nothing(kind, value):
    number, form = kind
    exif = (
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12" + struct.pack(">HI", number, 1) + struct.pack(form, value) + bytes(4)
    )
    assert pixels(stored(random_picture(), "PNG", exif=exif)).shape == (17, 23, 3)
    turned = exif[:-8] + struct.pack(">Hxx", 6) + bytes(4)
    if kind == SHORT:
        assert pixels(stored(random_picture(), "PNG", exif=turned)).shape == (23, 17, 3)


@pytest.mark.parametrize("size", [(1, 1), (200, 1), (1, 200), (2, 400)])
def test_small_and_narrow_pictures_are_taken(size):
    picture = random_picture(size=size)
    assert np.array_equal(pixels(stored(picture)), np.asarray(picture))


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ((1, 100_000), "a side may have"),
        ((100_000, 1), "a side may have"),
        ((1, 201), "200 times"),
        ((402, 2), "200 times"),
        ((1, 32_768), "200 times"),
        ((8193, 8192), "pixels"),
        ((32_768, 32_768), "pixels"),
        ((65_500, 65_500), "pixels"),
        ((2**31 - 1, 2**31 - 1), "pixels"),
        ((2**31, 1), ""),
        ((0, 5), ""),
        ((5, 0), ""),
        ((0, 0), ""),
    ],
)
def test_a_size_is_refused_from_the_header_alone(size, why, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("it was decoded"))
    assert why in refusal(header_only(*size))


def test_other_formats_are_checked_before_they_are_decoded_too(monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("it was decoded"))
    gif = b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;"
    grown = b"GIF89a\x01\0\x01\0\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;"
    jpeg = bytearray(stored(random_picture(), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = b"\xff\xdc\xff\xdc"
    webp = b"RIFF\x26\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0VP8L\x08\0\0\0/\xff\xff\xff\x0f\0\0\0"
    for data in (gif, grown, bytes(jpeg), webp):
        assert "pixels" in refusal(data)


def test_the_largest_picture_is_exactly_at_the_limit():
    assert MAX_PIXELS == 8192 * 8192
    assert "damaged" in refusal(header_only(8192, 8192))  # not too large: it has no pixels


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_cut_picture_is_refused_wherever_it_is_cut(kind):
    data = stored(random_picture(size=(64, 48)), kind)
    for share in (0.02, 0.1, 0.3, 0.5, 0.8, 0.97):
        refusal(data[: int(len(data) * share)])


SMALL = random_picture(size=(11, 9))
MOVING = {"save_all": True, "append_images": [SMALL.rotate(180)]}
FILES = {
    "png": stored(SMALL, "PNG"),
    "png with a palette": stored(SMALL.convert("P"), "PNG"),
    "png with alpha": stored(SMALL.convert("RGBA"), "PNG"),
    "animated png": stored(SMALL, "PNG", **MOVING),
    "jpeg": stored(SMALL, "JPEG"),
    "progressive jpeg": stored(SMALL, "JPEG", progressive=True),
    "grey jpeg": stored(SMALL.convert("L"), "JPEG"),
    "webp": stored(SMALL, "WEBP"),
    "lossless webp": stored(SMALL, "WEBP", lossless=True),
    "animated webp": stored(SMALL, "WEBP", **MOVING),
    "gif": stored(SMALL, "GIF"),
    "animated gif": stored(SMALL, "GIF", **MOVING),
}


@pytest.mark.parametrize("name", FILES)
def test_no_beginning_of_a_file_is_taken_for_all_of_it(name):
    data = FILES[name]
    assert pixels(data + b"anything behind it").shape == (*SMALL.size[::-1], 3)
    for length in range(len(data)):
        refusal(data[:length])


@pytest.mark.parametrize("name", [b"IHDR", b"tEXt", b"IDAT", b"IEND"])
def test_a_png_with_a_wrong_checksum_is_refused(name):
    samples = RNG.integers(0, 256, (5, 4, 3))
    data = png(samples, 8, COLOUR, tEXt=b"Title\0of a picture")
    assert np.array_equal(pixels(data), samples)
    at = data.index(name)
    end = at + 4 + int.from_bytes(data[at - 4 : at])
    assert "damaged" in refusal(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :])


def test_bytes_between_the_blocks_of_a_gif_are_passed_over():
    data = FILES["gif"]
    assert np.array_equal(pixels(data[:-1] + b"\0\0" + data[-1:]), pixels(data))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_whatever_bytes_are_changed_it_is_a_picture_or_a_refusal(kind):
    data = stored(random_picture(size=(40, 30)), kind)
    for _ in range(150):
        changed = bytearray(data)
        for at in RNG.integers(0, len(data), 3):
            changed[at] = RNG.integers(0, 256)
        try:
            assert pixels(bytes(changed)).shape[2] == 3
        except Refused:
            refusal(bytes(changed))


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0", b"text", SVG, b"<?xml version='1.0'?>" + SVG, b"%PDF-1.7\n", b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"8BPS\0\1" + bytes(20),
        b"PK\3\4", b"\x1f\x8b\x08\0", b"BM" + bytes(60), b"RIFF\x10\0\0\0WAVEfmt ", b"\0\0\0\x18ftypavif",
        b"\0\0\1\0\1\0",
        b"P6 1 1 255 abc", b"\x89PNG", b"\x89PNG\r\n\x1a", b"\xff\xd8", b"GIF88a", b"\xef\xbb\xbf" + SIGNATURE,
    ],
    ids=range(20),
)  # fmt: skip
def test_what_begins_otherwise_is_none_of_the_formats(data):
    assert "PNG, JPEG, WEBP or GIF" in refusal(data)


@pytest.mark.parametrize(
    "kind", ["TIFF", "BMP", "PPM", "EPS", "PDF", "ICO", "TGA", "PCX", "SGI", "JPEG2000", "AVIF", "DDS"]
)
def test_formats_that_pillow_knows_are_not_taken_either(kind):
    assert "PNG, JPEG, WEBP or GIF" in refusal(stored(random_picture(size=(32, 32)), kind))


@pytest.mark.parametrize("head", [SIGNATURE, b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\x10\0\0\0WEBPVP8 "])
def test_another_file_behind_the_right_first_bytes_is_refused(head):
    for tail in (stored(random_picture(), "TIFF"), SVG, b"%!PS\n", bytes(1000), os.urandom(1000)):
        refusal(head + tail)


def test_a_text_that_unpacks_to_gigabytes_does_no_harm():
    bomb = zlib.compress(bytes(64 << 20))
    samples = np.zeros((2, 2, 1), dtype=int)
    for name in ("zTXt", "iCCP"):
        data = png(samples, 8, GREY, **{name: b"key\0\0" + bomb})
        try:
            assert pixels(data).shape == (2, 2, 3)
        except Refused:
            refusal(data)


def test_pixels_that_unpack_to_more_than_the_size_are_not_kept():
    header = struct.pack(">IIBBBBB", 4, 4, 8, GREY, 0, 0, 0)
    bomb = zlib.compress(bytes(64 << 20))
    data = SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", bomb) + chunk(b"IEND", b"")
    assert (pixels(data) == 0).all()
