"""A chat in the terminal without a terminal: what its commands take, and what it says of the tokens of answers."""

from __future__ import annotations

import textwrap

import pytest

from tureen.cli.chat import screen, slash
from tureen.cli.chat.connection import ChatError
from tureen.cli.chat.conversation import Conversation, Message

WRAP = {"break_long_words": False, "break_on_hyphens": False}


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("temperature 0.2", 0.2),
        ("seed 7", 7),
        ("max_tokens 12", 12),
        ("ignore_eos true", True),
        ("stop END", ["END"]),
        ('stop ["a", "b"]', ["a", "b"]),
        ("regex [0-9]+", "[0-9]+"),
        ("regex 7", "7"),
        ('logit_bias {"5": 1}', {"5": 1}),
    ],
)
def test_a_parameter_takes_values_of_its_type(typed, value):
    conversation = Conversation()
    slash.run(f"/set {typed}", conversation)
    assert conversation.settings == {typed.split()[0]: value}


@pytest.mark.parametrize("typed", ["temperature abc", "temperature -1", "top_p 7", "seed 1.5", "max_tokens many"])
def test_a_parameter_refuses_another_value_and_keeps_what_it_was(typed):
    name = typed.split()[0]
    conversation = Conversation(settings={name: 1})
    with pytest.raises(
        ChatError, match=rf"^{name} must be a (whole )?number( [<>]=? [\d.]+)?, got {typed.split()[1]}$"
    ):
        slash.run(f"/set {typed}", conversation)
    assert conversation.settings == {name: 1}


@pytest.mark.parametrize("word", ["/exit", "/bye", "/quit"])
def test_the_words_of_ollama_s_users_end_the_chat_too(word):
    assert slash.run(word, Conversation()).ends


class Server:
    """Answers with three tokens that come in one burst. meta: what the last event says of the answer."""

    def __init__(self, meta):
        self._meta = meta

    def events(self, path, body):
        assert path == "/v1/chat/completions"
        for number, text in enumerate(("One", " two", " three"), 1):
            usage = {"prompt_tokens": 30, "completion_tokens": number}
            yield {"choices": [{"delta": {"content": text}, "finish_reason": None}], "usage": usage}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"} | self._meta], "usage": usage}


def asked() -> Conversation:
    return Conversation(model="m", messages=[Message("user", "Count.")])


@pytest.mark.parametrize(
    ("meta", "rate"),
    [({}, None), ({"meta_info": {"e2e_latency": 1.0}}, None), ({"meta_info": {"decode_throughput": 100.0}}, 100.0)],
)
def test_the_speed_of_an_answer_is_the_server_s_however_fast_it_is_read(meta, rate):
    conversation = asked()
    assert "".join(piece.text for piece in conversation.answer(Server(meta))) == "One two three"
    assert [cost.tokens_per_s for cost in conversation.costs] == [rate]
    assert ("tokens/s" in slash.run("/stats", conversation).text) == (rate is not None)


def test_an_answer_that_ctrl_c_ends_counts_its_tokens():
    conversation = asked()
    pieces = conversation.answer(Server({}))
    next(pieces)
    next(pieces)
    pieces.close()
    assert conversation.messages[-1] == Message("assistant", "One two", was_cut=True)
    assert "31 of 512 tokens" in screen._toolbar(conversation, 512)
    assert slash.run("/stats", conversation).text.endswith("all: 1 answer, 1 token")


@pytest.mark.parametrize("size", [1, 2, 5, 1000], ids="pieces of {} characters".format)
@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog and runs away.",
        "One line\nand another,\n\nwith a gap, and what follows it here.",
        "A word-that-is-longer-than-any-line-of-the-terminal stays whole.",
    ],
)
def test_lines_of_an_answer_end_between_words_however_the_text_is_cut(text, size):
    lines = screen.Lines(20)
    shown = "".join(lines.add(text[start : start + size]) for start in range(0, len(text), size)) + lines.end()
    expected = [line for paragraph in text.split("\n") for line in textwrap.wrap(paragraph, 20, **WRAP) or [""]]
    assert [line.rstrip() for line in shown.split("\n")] == expected


def test_a_text_without_spaces_is_shown_as_it_comes_and_broken_at_the_width():
    lines = screen.Lines(10)
    assert "".join(map(lines.add, "東京は日本の首都です")) == "東京は日本\nの首都です"


def test_without_a_terminal_an_answer_is_left_as_it_is():
    lines = screen.Lines(None)
    assert [lines.add("a long"), lines.add("er text "), lines.end()] == ["a long", "er text ", ""]
