"""The first screen of README.md, and one block of a page, as a newcomer runs them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from page_blocks import ROOT, block_with

pytestmark = pytest.mark.model

ADDRESS = "http://127.0.0.1:30000"


def answers(server, block: str) -> Iterator[Any]:
    """Yield what the server answers to each curl command of a block."""
    for command in block.replace("\\\n", " ").splitlines():
        words = shlex.split(command)
        assert words[1].startswith(ADDRESS)
        headers = {"content-type": "application/json"}
        url = words[1].replace(ADDRESS, server.url)
        answer = httpx.post(url, content=words[words.index("-d") + 1], headers=headers)
        assert answer.status_code == 200, answer.text
        yield answer.json()


def test_the_first_screen_of_the_readme_and_the_first_question_are_answered_rightly(server):
    the_first_screen_of_the_readme_and_a_block_of_a_page_are_answered(server)
    the_first_question_is_answered_rightly_whatever_the_seed(server)


def the_first_screen_of_the_readme_and_a_block_of_a_page_are_answered(server):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("make serve") < text.index(f"curl {ADDRESS}") < 1000
    chat, generated = answers(server, block_with("README.md", f"curl {ADDRESS}/v1/chat/completions"))
    assert "Tokyo" in chat["choices"][0]["message"]["content"]
    assert "Paris" in generated["text"]
    [answer] = answers(server, block_with("responses.md", '"What is the capital of France?"'))
    assert "Paris" in answer["output"][-1]["content"][0]["text"]


def the_first_question_is_answered_rightly_whatever_the_seed(server):
    """With the model's own sampling, as the playground and `tureen chat` ask it."""
    question = "What is the capital of Japan?"
    for page in ("README.md", "docs/terminal.md", "tureen/app/playground/index.html"):
        assert question in (ROOT / page).read_text(encoding="utf-8")
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 16}
    texts = [
        httpx.post(f"{server.url}/v1/chat/completions", json=body | {"seed": seed}).json()["choices"][0]["message"]
        for seed in range(20)
    ]
    assert [text["content"] for text in texts if "Tokyo" not in text["content"]] == []
