"""What a string in image_data is taken for."""

from __future__ import annotations

import pytest

from tureen.errors import Forbidden, InvalidRequest
from tureen.media.references import MAX_BASE64_CHARS, Inline, Local, Remote, parse_reference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:image/png;base64,AAAA", Inline("AAAA")),
        ("DATA:IMAGE/PNG;BASE64,AAAA", Inline("AAAA")),
        ("data:;base64,AAAA", Inline("AAAA")),
        ("data:application/octet-stream;base64,AAAA", Inline("AAAA")),
        ("data:image/svg+xml;charset=utf-8;base64,AAAA", Inline("AAAA")),
        ("data:video/mp4;base64,AAAA", Inline("AAAA")),
        ("https://example.com/a.png", Remote("https://example.com/a.png")),
        ("HTTP://example.com/", Remote("HTTP://example.com/")),
        ("iVBORw0KGgo=", Inline("iVBORw0KGgo=")),
        ("iVBO\nRw0K\r\nGgo=\n", Inline("iVBO\nRw0K\r\nGgo=\n")),
        ("/9j/4AAQSkZJRg==", Inline("/9j/4AAQSkZJRg==")),
        ("dog", Inline("dog")),
        ("A" * 5000 + "!", Inline("A" * 5000 + "!")),
        ("./dog", Local("./dog")),
        ("dog.png", Local("dog.png")),
        ("pictures/dog.JPG", Local("pictures/dog.JPG")),
        ("../dog", Local("../dog")),
        ("/etc/passwd", Local("/etc/passwd")),
        ("/dev/zero", Local("/dev/zero")),
        ("/proc/self/environ", Local("/proc/self/environ")),
        ("file:///etc/passwd", Local("/etc/passwd")),
        ("FILE://localhost/etc/pass%77d", Local("/etc/passwd")),
        ("file:a.png", Local("a.png")),
        ("file://elsewhere/a.png", Local("//elsewhere/a.png")),
        ("C:\\dog", Local("C:\\dog")),
        ("a_b-c", Local("a_b-c")),
        (" http://example.com/", Local(" http://example.com/")),
        ("\ud800", Local("\ud800")),
    ],
)
def test_the_first_rule_that_fits_decides(text, expected):
    assert parse_reference(text, "image_data") == expected


@pytest.mark.parametrize("text", ["ftp://example.com/a.png", "gopher://x", "s3://bucket/a", "view-source://http://x"])
def test_no_other_scheme_is_a_url_that_could_be_fetched(text):
    with pytest.raises(Forbidden) as error:
        parse_reference(text, "image_data")
    assert error.value.code == "media_url_forbidden"
    assert error.value.field == "image_data"


@pytest.mark.parametrize("text", ["jar:http://x", "http:/x.png", "http:x.png", "//x/a.png", "blob:http://x"])
def test_what_only_looks_like_a_url_is_a_file_name(text):
    assert parse_reference(text, "image_data") == Local(text)


@pytest.mark.parametrize(
    "text",
    ["", " \n ", "data:", "data:image/png,AAAA", "data:text/html;base64,AAAA", "data:image/png;base64,", "data:" * 9],
)
def test_what_is_empty_or_no_data_url_of_a_picture_is_refused(text):
    with pytest.raises(InvalidRequest) as error:
        parse_reference(text, "image_data[3]")
    assert error.value.code == "invalid_image"
    assert error.value.field == "image_data[3]"
    assert len(error.value.message) < 300


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_base64_beyond_the_limit_is_refused_before_it_is_decoded(head):
    assert parse_reference(head + "A" * MAX_BASE64_CHARS, "image_data")
    with pytest.raises(InvalidRequest, match="20 MiB"):
        parse_reference(head + "A" * (MAX_BASE64_CHARS + 1), "image_data")
