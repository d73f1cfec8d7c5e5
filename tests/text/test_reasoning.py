"""Reasoning and answer, however the text is cut into pieces."""

import random

import pytest

from tureen.errors import StartupError
from tureen.text.messages import Content, Reasoning
from tureen.text.reasoning import FORMATS, ReasoningParser, find_reasoning_format, reasoning_format

SAMPLES = {
    "qwen3, thinking": ("<think>\nTwo\n\nlines.\n</think>\n\nIt is 7.\n", ("Two\n\nlines.", "It is 7.\n"), ...),
    "qwen3, not thinking": ("<think>\n\n</think>\n\nIt is 7.", ("", "It is 7."), ...),
    "deepseek-r1, the prompt has the mark": (
        "Well.\n</think>\nIt is 7.",
        ("", "Well.\n</think>\nIt is 7."),
        ("Well.", "It is 7."),
    ),
    "no reasoning": ("It is <b>7</b>.", ("", "It is <b>7</b>."), ("It is <b>7</b>.", "")),
    "a mark in the answer": (
        "<think>x</think>Write </think> after <think>.",
        ("x", "Write </think> after <think>."),
        ...,
    ),
    "a mark that does not begin the text": (
        "The mark <think> begins it.",
        ("", "The mark <think> begins it."),
        ("The mark <think> begins it.", ""),
    ),
    "white space before the mark": (" \n<think>x</think>y", ("x", "y"), ...),
    "white space alone": (" \n ", ("", " \n "), (" \n ", "")),
    "cut within the reasoning": ("<think>I wonder\n\n", ("I wonder", ""), ...),
    "cut within a mark": ("<think>I wonder</thi", ("I wonder</thi", ""), ...),
    "cut within the first mark": ("<thi", ("", "<thi"), ("<thi", "")),
    "half marks": ("<think><</</</think></</think>", ("<</</", "</</think>"), ...),
    "indented answer": ("<think>x</think>\n\n    code", ("x", "    code"), ...),
    "windows": ("<think>\r\nx\r\n</think>\r\ny", ("x", "y"), ...),
    "nothing": ("", ("", ""), ...),
}
"""A text, its (reasoning, content), and the same where outputs begin within reasoning; ...: no difference."""


def parsed(pieces, form="qwen3", **options):
    parser = ReasoningParser(FORMATS[form], **options)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.close()
    assert all(part.text for part in parts)
    kinds = [type(part) for part in parts]
    assert kinds == sorted(kinds, key=[Reasoning, Content].index), "reasoning comes first"
    return tuple("".join(part.text for part in parts if type(part) is kind) for kind in (Reasoning, Content))


@pytest.mark.parametrize("starts_inside", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_text_is_told_apart_the_same_wherever_it_is_cut(name, starts_inside):
    text, outside, inside = SAMPLES[name]
    wanted = outside if not starts_inside or inside is ... else inside
    assert parsed([text], starts_inside=starts_inside) == wanted
    assert parsed(text, starts_inside=starts_inside) == wanted
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            assert parsed(pieces, starts_inside=starts_inside) == wanted, pieces


@pytest.mark.parametrize("starts_inside", [False, True])
def test_any_mixture_of_marks_and_text_is_told_apart_the_same_in_any_pieces(starts_inside):
    source = random.Random(5)
    for _ in range(300):
        text = "".join(source.choices(["<think>", "</think>", "<", "</", "think>", "\n", " ", "ab"], k=12))
        cuts = sorted(source.choices(range(len(text) + 1), k=5))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        got = parsed(pieces, starts_inside=starts_inside)
        assert got == parsed([text], starts_inside=starts_inside)
        if text.lstrip().startswith("<think>"):
            inner = text.lstrip().removeprefix("<think>")
        elif starts_inside:
            inner = text
        else:
            assert got == ("", text)
            continue
        thought, _, answer = inner.partition("</think>")
        assert got == (thought.strip("\n"), answer.lstrip("\n"))


def test_what_cannot_belong_to_a_mark_is_not_held_back():
    parser = ReasoningParser(FORMATS["qwen3"])
    assert parser.feed("<think>") == []
    assert parser.feed("a <") == [Reasoning("a ")]
    assert parser.feed("b\n") == [Reasoning("<b")]
    assert parser.feed("c</thin") == [Reasoning("\nc")]
    assert parser.feed("k>\nd") == [Content("d")]
    assert parser.feed("<think>") == [Content("<think>")]
    assert parser.close() == []


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("deepseek-r1", "I think.</think>So."),
        ("qwen3-thinking", "I think.</think>So."),
        ("step3", "I think.</think>So."),
        ("qwen3", "<think>I think.</think>So."),
        ("glm45", "<think>I think.</think>So."),
        ("kimi", "◁think▷I think.◁/think▷So."),
        ("mistral", "[THINK]I think.[/THINK]So."),
        ("seed-oss", "<seed:think>I think.</seed:think>So."),
        ("hunyuan-a13b", "<think>\nI think.\n</think>\n<answer>\nSo.\n</answer>"),
        ("cohere-command3", "<|START_THINKING|>I think.<|END_THINKING|><|START_RESPONSE|>So.<|END_RESPONSE|>"),
        ("cohere-command4", "<|START_THINKING|>I think.<|END_THINKING|><|START_TEXT|>So.<|END_TEXT|>"),
    ],
)
def test_each_model_family_has_its_marks(form, text):
    assert parsed(text, form) == ("I think.", "So.")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\n\n</think>\n<answer>\nSo.\n</answer>", ("", "So.")),
        ("<answer>\nSo\n\nit is.\n</answer>\n", ("", "So\n\nit is.")),
        ("<think>x</think><answer>So", ("x", "So")),
        ("<think>x</think><answer>So</ans", ("x", "So</ans")),
        ("<think>x</think>\n<ans", ("x", "<ans")),
        ("<think>x</think>So </answer>", ("x", "So </answer>")),
        ("So <answer>", ("", "So <answer>")),
        ("<think>x</think><tool_calls>[]</tool_calls>", ("x", "<tool_calls>[]</tool_calls>")),
        ("<answer>a</answer> b", ("", "a b")),
    ],
)
def test_the_marks_of_an_answer_are_no_part_of_it(text, wanted):
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            assert parsed(pieces, "hunyuan-a13b") == wanted, pieces


def test_the_names_of_vllm_are_known_too():
    assert find_reasoning_format("deepseek_r1") == FORMATS["deepseek-r1"]


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("{% if '<answer>' in content and '</answer>' in content %}<think>", "<think>"),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_TEXT|>x<|END_TEXT|>", "<|START_THINKING|>"),
        ("{% if enable_thinking %}<think>\n{% endif %}", "<think>"),
        ("{{ content.split('</think>')[-1] }}", "<think>"),
        ("[THINK]{{ thinking }}[/THINK]", "[THINK]"),
        ("{{ '<seed:think>' + thinking + '</seed:think>' }}", "<seed:think>"),
        ('{{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}', "<|channel|>analysis<|message|>"),
        ("{{ message.content + '<|end|>\n<|assistant|>' }}", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_chat_template_tells_the_marks(template, begin):
    found = reasoning_format("auto", template)
    assert (found and found.begin) == begin
    assert found is None or not found.starts_inside
    assert found is None or found.answer_end in template


def test_the_operator_chooses_the_parser_by_name_and_hears_of_a_wrong_one():
    assert reasoning_format("none", "<think>") is None
    assert reasoning_format("deepseek-r1", "") == FORMATS["deepseek-r1"]
    with pytest.raises(StartupError, match=r"--reasoning-parser 'deepsek'.*deepseek-r1"):
        reasoning_format("deepsek", "")
