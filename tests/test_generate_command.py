"""`tureen generate`: a prompt, several samples, a file of prompts that is answered once however often it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from patience import wait_until

import tureen

pytestmark = pytest.mark.model

GREEDY = {"temperature": 0, "max_new_tokens": 6}
FLAGS = ("--temperature", "0", "--max-new-tokens", "6")
PROMPTS = [f"Number {number} is" for number in range(40)]


def generate(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tureen", "generate", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def answers(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kill_after(num_answers: int, target, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "tureen", "generate", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(
        lambda: (target.exists() and target.read_bytes().count(b"\n") >= num_answers) or process.poll() is not None,
        "some answers",
    )
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def texts(default_model_source) -> list[str]:
    """What the engine answers to each prompt."""
    with tureen.Engine(max_total_tokens=2048, engine="thread") as engine:
        return [engine.generate(prompt, GREEDY)["text"] for prompt in PROMPTS]


@pytest.mark.parametrize("end", ["", "\n"], ids=["as printf writes it", "as echo writes it"])
def test_a_prompt_from_standard_input_is_continued_and_nothing_else_is_printed(texts, end):
    done = generate(*FLAGS, text=PROMPTS[0] + end)
    assert done.stdout == texts[0] + "\n"
    assert "load weights" in done.stderr


def test_samples_stand_apart(texts):
    done = generate(PROMPTS[0], *FLAGS, "--n", "2")
    assert done.stdout == "".join(f"--- {number} of 2\n{texts[0]}\n" for number in (1, 2))


def test_a_file_that_is_killed_and_gone_on_with_is_answered_line_by_line_once(texts, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    arguments = ["--input", str(source), "--output", str(target), "--concurrency", "2", *FLAGS]
    for repeats in (1, 10, 100):  # until one is long enough to be killed in the middle
        prompts = PROMPTS * repeats
        source.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        target.unlink(missing_ok=True)
        for enough in (3, 11):
            kill_after(enough, target, arguments)
            with target.open("ab") as kept:
                kept.write(b'{"line": 7, "dig')  # as a machine that loses power may leave it
        if target.read_bytes().count(b"\n") < len(prompts):
            break
    done = generate(*arguments)
    assert done.returncode == 0, done.stderr
    assert "are answered already" in done.stderr
    by_line = {answer["line"]: answer["text"] for answer in answers(target)}
    assert len(answers(target)) == len(prompts)
    assert [by_line[number] for number in range(1, len(prompts) + 1)] == texts * repeats
    assert "every line is answered already" in generate(*arguments).stderr


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
        (["--input", "in.jsonl", "--output", "in.jsonl"], "was not made by this command"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--concurrency", "0"], "--concurrency 0"),
        (["Hello", "--input", "in.jsonl", "--output", "out.jsonl"], "give one of them"),
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
    assert "another process writes it" in done.stderr
    assert os.path.getsize(target) == 0
