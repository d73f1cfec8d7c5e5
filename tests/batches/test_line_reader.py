"""Inputs are read in pieces: the lines that stand in the file, each once, whatever is long or blank."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from tureen.batches import lines
from tureen.batches.lines import LineReader
from tureen.batches.usage import TokensUsed, usage_of

texts = st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"") + b"\n"), max_size=30).map(b"".join)


@given(text=texts, rest=st.binary(max_size=20), slice_bytes=st.integers(1, 50), max_bytes=st.integers(1, 60))
def test_all_lines_come_in_order_up_to_one_that_is_too_long(text, rest, slice_bytes, max_bytes):
    kept, lines.SLICE_BYTES = lines.SLICE_BYTES, slice_bytes
    try:
        reader, read = LineReader(lambda: io.BufferedReader(io.BytesIO(text + rest)), max_bytes), []
        while not reader.is_at_end:
            piece = reader.piece()
            assert sum(len(raw) for _, raw in piece[:-1]) < slice_bytes
            read += piece
            if reader.is_in_long_line:
                read.append(reader.long_line())
    finally:
        lines.SLICE_BYTES = kept
    expected = []
    for number, raw in enumerate(io.BytesIO(text + rest), 1):
        if len(raw) > max_bytes:
            expected.append((number, raw[: max_bytes + 1]))
            break
        expected.append((number, raw))
    assert [line for line in read if line[1].strip()] == [line for line in expected if line[1].strip()]


def test_the_tokens_of_an_answer_are_read_in_each_api_s_words():
    chat = b'{"response": {"body": {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": '
    chat += b'{"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 1}}}}}'
    assert usage_of(chat) == TokensUsed(3, 2, 4, 1)
    response = b'{"response": {"body": {"usage": {"input_tokens": 5, "output_tokens": 6, "input_tokens_details": '
    response += b"null}}}}"
    assert usage_of(response) == TokensUsed(5, 0, 6, 0)
    for nothing in (b'{"response": null}', b'{"response": {"body": {"error": {}}}}', b"[]", b"{"):
        assert usage_of(nothing) == TokensUsed()
