"""LiteLLM's proxy in front of the server, asked by OpenAI's and Anthropic's forms."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from questions import CAPITAL, DESCRIBE, Person
from timeouts import PATIENCE_S, wait_until

CLIENT = "LiteLLM's proxy"
PACKAGES = ("litellm",)

CONFIG = """\
model_list:
  - model_name: served
    litellm_params: {{model: openai/default, api_base: "{url}/v1", api_key: none}}
  - model_name: claude
    litellm_params: {{model: anthropic/claude-default, api_base: "{url}", api_key: none}}
litellm_settings: {{telemetry: false, num_retries: 0}}
"""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the proxy once, in front of the address that the first test has."""
    running: dict[str, object] = {}

    def begin(url: str) -> httpx.Client:
        if running:
            return running["client"]
        config = tmp_path_factory.mktemp("proxy") / "config.yaml"
        config.write_text(CONFIG.format(url=url), encoding="utf-8")
        port = free_port()
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(config), "--port", str(port)]
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": "sk-1"}
        log = config.with_suffix(".log")
        with log.open("w") as output:
            process = subprocess.Popen([*command, "--host", "127.0.0.1"], env=environment, stdout=output, stderr=output)
        running["process"] = process
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=120, headers={"authorization": "Bearer sk-1"}
        )
        running["client"] = client
        # Its imports alone take twenty seconds of a processor, which are minutes on a busy machine.
        wait_until(lambda: process.poll() is not None or is_up(client), "the proxy's start", 5 * PATIENCE_S)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        return client

    yield begin
    if running:
        running["client"].close()
        running["process"].terminate()
        running["process"].wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health/liveliness").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def proxy(start, url):
    return start(url)


def chat(proxy, model, text, **more):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 200}
    return proxy.post("/v1/chat/completions", json=body | more)


@pytest.mark.parametrize("model", ["served", "claude"])
def test_a_chat_whole_and_streamed(proxy, model):
    whole = chat(proxy, model, CAPITAL).json()["choices"][0]["message"]["content"]
    assert "Paris" in whole
    lines = [line.removeprefix("data: ") for line in chat(proxy, model, CAPITAL, stream=True).text.splitlines() if line]
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines if line != "[DONE]"]
    assert "".join(pieces) == whole


@pytest.mark.parametrize("model", ["served", "claude"])
def test_structured_output(proxy, model):
    schema = Person.model_json_schema() | {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    text = chat(proxy, model, DESCRIBE, response_format=form).json()["choices"][0]["message"]["content"]
    assert Person.model_validate_json(text)


def test_a_message_in_anthropics_form(proxy):
    body = {"model": "claude", "max_tokens": 40, "messages": [{"role": "user", "content": CAPITAL}]}
    answer = proxy.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["type"] == "text"


def test_an_error_names_the_field(proxy):
    answer = chat(proxy, "served", CAPITAL, top_p=7)
    assert (answer.status_code, "top_p" in answer.text) == (400, True)
