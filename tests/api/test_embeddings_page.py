"""docs/embeddings.md: its commands work, on the kind of model that they are for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from app_under_test import App
from embedding_engine import make_embedding_engine

from tureen.contract.types import Classifier

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^curl .*$", PAGE.replace("\\\n", " "), re.MULTILINE)
SERVER = "http://127.0.0.1:30000"
RERANKING = ("/v1/rerank", "/v2/rerank", "/rerank")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_on_the_page_works(app: App, command):
    words = shlex.split(command)
    path = next(word for word in words if word.startswith(SERVER)).removeprefix(SERVER)
    how = {"content": words[words.index("-d") + 1], "headers": {"content-type": "application/json"}}
    if path not in (*RERANKING, "/classify"):
        response = app.request("POST", path, **how)
    else:
        facts = {} if path in RERANKING else {"classifier": Classifier(("bad", "poor", "fair", "good"))}
        with App(factory=make_embedding_engine, facts=facts) as other:
            response = other.request("POST", path, **how)
    assert response.status_code == 200, response.text
