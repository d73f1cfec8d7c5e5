"""Open WebUI's server in front of this one: a person signs up, chats, and the page's own requests follow."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx
import pytest
from agent_server import repeat_call
from connect_page import variables
from questions import CAPITAL
from timeouts import PATIENCE_S, wait_until

CLIENT = "Open WebUI"
PACKAGES = ("open-webui",)
NOTES = ("Its install here leaves out torch and sentence-transformers, which compute embeddings of documents.",)
PERSON = {"name": "Ada", "email": "ada@example.com", "password": "a long Passw0rd!"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts it once and signs up."""
    running: list[tuple[subprocess.Popen, httpx.Client]] = []

    def begin(url: str) -> httpx.Client:
        if running:
            return running[0][1]
        home, port = tmp_path_factory.mktemp("home"), free_port()
        environment = os.environ | variables("Open WebUI", url) | {"DATA_DIR": str(home), "HOME": str(home)}
        command = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
        log = home / "log"
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=home, env=environment, stdout=output, stderr=output)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        running.append((process, client))
        wait_until(lambda: process.poll() is not None or is_up(client), "the start", 5 * PATIENCE_S)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        client.headers["authorization"] = f"Bearer {client.post('/api/v1/auths/signup', json=PERSON).json()['token']}"
        return client

    yield begin
    for process, client in running:
        client.close()
        process.terminate()
        process.wait()


@pytest.fixture
def client(start, url):
    return start(url)


@pytest.fixture
def model(client):
    (one,) = client.get("/api/models").json()["data"]
    return one["id"]


def complete(client, model, text, **more):
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return client.post("/api/chat/completions", json=body)


def chat(client, model, text, tasks=(), **params):
    """Sends a message as the page does. Returns the answer that it keeps, once title and suggestions are made too."""
    asked, answered = str(uuid.uuid4()), str(uuid.uuid4())
    base = {"timestamp": int(time.time()), "models": [model]}
    question = {"id": asked, "parentId": None, "childrenIds": [answered], "role": "user", "content": text, **base}
    answer = {"id": answered, "parentId": asked, "childrenIds": [], "role": "assistant", "content": "", "model": model}
    history = {"messages": {asked: question, answered: answer}, "currentId": answered}
    new = {"title": "New Chat", "models": [model], "history": history, "messages": [question, answer]}
    chat_id = client.post("/api/v1/chats/new", json={"chat": new}).json()["id"]
    page = {"chat_id": chat_id, "id": answered, "session_id": "one", "params": params, "stream": True}
    started = complete(client, model, text, **page, background_tasks=dict.fromkeys(tasks, True))
    assert started.status_code == 200, started.text
    wait_until(lambda: not client.get(f"/api/tasks/chat/{chat_id}").json()["task_ids"], "the answer and its tasks")
    return client.get(f"/api/v1/chats/{chat_id}").json()["chat"]["history"]["messages"][answered]


def test_the_model_is_listed(client, model, url):
    assert model == "smollm2:135m"


def test_a_chat_whole_and_streamed(client, model):
    whole = complete(client, model, CAPITAL).json()["choices"][0]["message"]["content"]
    assert "Paris" in whole
    lines = complete(client, model, CAPITAL, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(pieces) == whole


def test_a_page_s_chat_with_title_tags_and_suggestions(client, model):
    tasks = ("title_generation", "tags_generation", "follow_up_generation")
    params = {"temperature": 0, "top_k": 0, "repeat_penalty": 1.0, "mirostat": 0, "seed": 3, "stop": ["###"]}
    answer = chat(client, model, CAPITAL, tasks, **params)
    assert "Paris" in answer["content"]
    assert "error" not in answer


def test_its_own_tool_is_called_and_the_result_is_read(client, model):
    answer = chat(client, model, repeat_call("get_current_timestamp", {}))
    assert [part["type"] for part in answer["output"]][:2] == ["function_call", "function_call_output"], answer
    assert "current_iso" in json.dumps(answer["output"][1])


def test_an_error_names_the_field(client, model):
    refused = complete(client, model, CAPITAL, top_p=7)
    assert (refused.status_code, "top_p: expected" in refused.text) == (400, True)
    assert "top_p: expected" in json.dumps(chat(client, model, CAPITAL, top_p=7)["error"])
