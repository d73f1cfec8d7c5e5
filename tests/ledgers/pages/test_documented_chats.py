"""Every command of README.md and docs/ that asks for a chat or a completion sets a limit, and the real model's answer
is what the page lets a reader expect."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from server_process import ServerProcess
from timeouts import PATIENCE_S

GUARDS = ("docs/*.md", "README.md", "dialects", "contract", "requests", "app")

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[3]
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate",
)  # fmt: skip
COMMAND = re.compile(
    r"^curl [^\n]*?(?:http://127\.0\.0\.1:30000|localhost:30000)(\S+)((?:[^'\n]|'[^']*')*?)-d '([^']*)'", re.MULTILINE
)
HEADER = re.compile(r"-H '([^:']+): ([^']*)'")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")

EXPECTED = {
    "What is the capital of France?": r"\bParis\b",
    "What is the capital of Japan?": r"\bTokyo\b",
    "The capital of France is": r"\bParis\b",
    "Is water wet? ": r"^(yes|no)$",
    "Is it warm in Paris?": r'"city": ?"',
    "What is 3 + 4?": r"^\d{1,4}(\+\d{1,4}){1,3}$",
    "Paris is in France": r"^Paris is in France$",
}
"""What an answer has in it; to what is not here, a word."""


class Command(NamedTuple):
    """A command of a page."""

    page: str
    route: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def question(self) -> str:
        """Returns what the user says last."""
        if "messages" in self.body:
            return str(self.body["messages"][-1]["content"])
        return str(self.body.get("prompt", self.body.get("input")))


def commands() -> Iterator[Command]:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for route, words, body in COMMAND.findall(text):
            if route in ROUTES:
                yield Command(path.name, route, dict(HEADER.findall(words)), json.loads(body))


COMMANDS = list(commands())


def named(command: Command) -> str:
    return f"{command.page} {command.route} {command.question[:20]}"


@pytest.fixture(scope="module")
def open_server(default_model_source, tmp_path_factory) -> Iterator[ServerProcess]:
    store = tmp_path_factory.mktemp("store") / "responses.db"
    with ServerProcess("--responses-store", str(store)) as running:
        yield running.wait_ready()


def text_of(answer: dict[str, Any]) -> str:
    """Returns the text of any dialect's answer, or what it calls a tool with."""
    if "choices" in answer:
        [choice] = answer["choices"]
        if "text" in choice:
            return str(choice["text"])
        for call in choice["message"]["tool_calls"] or ():
            return str(call["custom"]["input"] if "custom" in call else call["function"]["arguments"])
        return str(choice["message"]["content"])
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
    if "content" in answer:
        return "".join(part["text"] for part in answer["content"])
    return str(answer["message"]["content"] if "message" in answer else answer["response"])


def test_the_pages_have_commands_of_every_route():
    assert {command.route for command in COMMANDS} == set(ROUTES)
    assert {"README.md", "openai.md", "anthropic.md", "ollama.md", "responses.md"} <= {one.page for one in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_a_command_sets_a_limit_and_is_answered_as_expected(open_server, command):
    assert (command.body | command.body.get("options", {})).keys() & set(LIMITS)
    pattern = EXPECTED.get(command.question)
    options = command.body.get("options", command.body)
    assert pattern is None or options.get("temperature") == 0 or options.get("max_tokens") == 0  # it must be no luck
    response = httpx.post(open_server.url + command.route, headers=command.headers, json=command.body, timeout=120)
    assert response.status_code == 200, response.text
    pieces = [text_of(json.loads(line)) for line in response.text.splitlines() if line]
    assert re.search(pattern or r"\w", "".join(pieces)), pieces


SUGGESTION = re.compile(r'class="suggestion">([^<]+)<')
SUGGESTED = {
    "What is the capital of Japan?": r"^[^.]*\bTokyo\b[^.]*\.$",
    "What is photosynthesis, in one sentence?": r"^Photosynthesis is [^.]*\bconverts carbon dioxide\b[^.]*\.$",
    "Write a Python function that reverses a string with slicing.": (
        r"```python\ndef \w+\((\w+).*\n    return \1\[::-1\]\n"
    ),
}


def test_the_default_model_answers_the_suggestions_of_the_playground(open_server):
    page = httpx.get(open_server.url, headers={"accept": "text/html"}).text
    assert set(SUGGESTION.findall(page)) == set(SUGGESTED)
    asked = list(itertools.product(SUGGESTED, range(5)))

    def answer(question: str, seed: int) -> str:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200, "sampling_seed": seed}
        return text_of(httpx.post(f"{open_server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json())

    with ThreadPoolExecutor(len(asked)) as pool:  # a batch takes a fraction of the time, and gives the same tokens
        answers = list(pool.map(answer, *zip(*asked, strict=True)))
    wrong = [
        (asking, text) for asking, text in zip(asked, answers, strict=True) if not re.search(SUGGESTED[asking[0]], text)
    ]
    assert wrong == []
