"""`tureen generate`: a prompt, several samples, a file of prompts that is answered once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from types import SimpleNamespace

import pytest

import tureen
from tureen.__main__ import main
from tureen.cli.commands import generate as generate_command

pytestmark = pytest.mark.model

GREEDY = {"temperature": 0, "max_new_tokens": 6}
FLAGS = ("--temperature", "0", "--max-new-tokens", "6")
PROMPTS = [f"Number {number} is" for number in range(6)]


def generate(*arguments: str, text: str = "") -> SimpleNamespace:
    """What the command prints, and how it ends."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(text))
        status = main(["generate", *arguments])
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def answers(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def engine(default_model_source):
    with tureen.Engine(max_total_tokens=2048, engine="thread") as running:
        yield running


@pytest.fixture(autouse=True)
def one_engine(engine, monkeypatch):
    """The command makes none of its own."""
    monkeypatch.setattr(generate_command, "_engine", lambda config: contextlib.nullcontext(engine))


@pytest.fixture(scope="module")
def texts(engine) -> list[str]:
    """What the engine answers to each prompt."""
    return [engine.generate(prompt, GREEDY)["text"] for prompt in PROMPTS]


@pytest.mark.parametrize("text", ["", "\n"])
def test_without_a_prompt_no_model_is_loaded(text, monkeypatch):
    monkeypatch.setattr(generate_command, "_engine", lambda config: pytest.fail("a model is loaded"))
    done = generate(text=text)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "tureen: standard input is empty: give a text, as in tureen generate 'Once upon'\n"


@pytest.mark.parametrize("end", ["", "\n"], ids=["as printf writes it", "as echo writes it"])
def test_a_prompt_from_standard_input_is_continued_and_nothing_else_is_printed(texts, end):
    done = generate(*FLAGS, text=PROMPTS[0] + end)
    assert done.stdout == texts[0] + "\n"
    assert done.stderr == ""


def test_a_file_that_ended_early_is_gone_on_with_and_each_line_is_answered_once(texts, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    arguments = ["--input", str(source), "--output", str(target), "--concurrency", "2", *FLAGS]
    source.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    assert generate(*arguments).returncode == 0
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:3]) + b'{"line": 7, "dig')  # as a machine that loses power may leave it
    done = generate(*arguments)
    assert done.returncode == 0, done.stderr
    assert "answered already: " in done.stderr
    assert {answer["line"]: answer["text"] for answer in answers(target)} == dict(enumerate(texts, 1))
    assert len(answers(target)) == len(PROMPTS)
    assert "every line is answered already" in generate(*arguments).stderr


def test_samples_stand_apart(texts):
    done = generate(PROMPTS[0], *FLAGS, "--n", "2")
    assert done.stdout == "".join(f"--- {number} of 2\n{texts[0]}\n" for number in (1, 2))


def test_a_wrong_line_is_answered_with_its_error_and_harms_no_other(texts, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps(PROMPTS[0]),
        "not JSON",
        "",
        json.dumps({"text": "A", "unheard": 1}),
        json.dumps({"text": "A", "sampling_params": {"top_p": 7}}),
        json.dumps({"text": "A", "stream": True}),
        "7",
        json.dumps({"prompt": PROMPTS[1], "custom_id": "mine", "sampling_params": {"n": 2}}),
    ]
    source.write_text("\n".join(lines))
    done = generate("--input", str(source), "--output", str(target), *FLAGS)
    assert done.returncode == 1
    by_line = {answer["line"]: answer for answer in answers(target)}
    assert sorted(by_line) == [1, 2, 4, 5, 6, 7, 8]
    assert by_line[1]["text"] == texts[0]
    assert [sample["text"] for sample in by_line[8]["samples"]] == [texts[1]] * 2
    assert by_line[8]["custom_id"] == "mine"
    fields = {number: by_line[number]["error"]["field"] for number in (2, 4, 5, 6, 7)}
    assert fields == {2: None, 4: "unheard", 5: "sampling_params.top_p", 6: "stream", 7: None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input", "in.jsonl"], "--output is missing"),
        (["--input", "nowhere.jsonl", "--output", "out.jsonl"], "nowhere.jsonl: No such file"),
        (["--input", "/dev/zero", "--output", "out.jsonl"], "/dev/zero"),
        (["--input", "in.jsonl", "--output", "/dev/null"], "must be a file"),
        (["--input", "in.jsonl", "--output", "in.jsonl"], "was not written by this command"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--concurrency", "0"], "--concurrency 0"),
        (["Hello", "--input", "in.jsonl", "--output", "out.jsonl"], "give only one"),
        (["Hello", "--temperature", "-1"], "--temperature '-1'"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('"Hello"\n')
    done = generate(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "in.jsonl").read_text() == '"Hello"\n'


def test_answers_to_other_lines_or_with_other_parameters_are_not_taken_for_these(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"Hello"\n')
    files = ["--input", str(source), "--output", str(target)]
    assert generate(*files, *FLAGS).returncode == 0
    before = target.read_bytes()
    for others in (["--temperature", "0", "--max-new-tokens", "7"], FLAGS):
        if others is FLAGS:
            source.write_text('"Goodbye"\n')
        done = generate(*files, *others)
        assert (done.returncode, target.read_bytes()) == (1, before)
        assert "name another file" in done.stderr


def test_a_file_is_written_by_one_process(tmp_path):
    import fcntl

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"Hello"\n')
    with target.open("ab") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        done = generate("--input", str(source), "--output", str(target))
    assert done.returncode == 1
    assert "another process is writing it" in done.stderr
    assert os.path.getsize(target) == 0
