"""`tureen generate`: a file of prompts is answered once however often the command is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from timeouts import wait_until

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
    assert "answered already: " in done.stderr
    by_line = {answer["line"]: answer["text"] for answer in answers(target)}
    assert len(answers(target)) == len(prompts)
    assert [by_line[number] for number in range(1, len(prompts) + 1)] == texts * repeats
    assert "every line is answered already" in generate(*arguments).stderr
    assert "load weights" in generate(PROMPTS[0], *FLAGS).stderr
