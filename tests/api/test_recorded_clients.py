"""What official clients sent to a real server is answered as ever.

`make test-clients ARGS=--record` writes the requests to tests/golden/clients, and
`python tests/api/test_recorded_clients.py` the answers that the application gives over the fake engine. Read the
difference before you commit it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app_under_test import App

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden" / "clients"
FILES = sorted(GOLDEN.glob("*.json"))
SHORT_TEMPLATE = TESTS / "clients" / "last_message.jinja"
"""Shows little of a chat: the whole prompts of agents are longer than the context here."""

AGENTS = {
    check.stem.removeprefix("check_")
    for conftest in (TESTS / "clients").glob("*/conftest.py")  # it sets the template
    for check in conftest.parent.glob("check_*.py")
}
SERVED = "SmolLM2-135M-Instruct.Q4_1"
VOCAB_SIZE = 256
CHANGING = re.compile(
    r"^(id|call_id|item_id|request_id|response_id|created|created_at|completed_at|modified_at|model_path|tokenizer_path|version"
    r"|sampling_seed|cached_tokens|cache_read_input_tokens|e2e_latency|\w+_duration|digest|size|system_fingerprint)$"
)
"""Fields whose values are others with each request, version or model."""

TELLING = re.compile(r"(^|\.)(object|type|role|done|\w*_reason)$")
"""Fields of events whose values are few and matter."""


def _make_app(for_agents: bool = False) -> App:
    """Random choices are seeded for who sends no seed. Each event of a stream has one token's text: App's engine makes
    no step before. The application for agents is set up as tests/clients/agent_server.py says."""
    facts, sampling = {"model_name": SERVED}, {"sampling_seed": 1}
    if not for_agents:
        return App(facts=facts, preferred_sampling_params=json.dumps(sampling), chat_template="chatml")
    sampling |= {"max_new_tokens": 200}
    settings = {"chat_template": str(SHORT_TEMPLATE), "tool_call_parser": "hermes"}
    return App(facts=facts, preferred_sampling_params=json.dumps(sampling), **settings)


@pytest.fixture(scope="module")
def apps() -> Iterator[dict[bool, App]]:
    """The application for agents (True) and for other clients."""
    with _make_app() as for_others, _make_app(for_agents=True) as for_agents:
        yield {True: for_agents, False: for_others}


def answer(app: App, request: dict[str, Any]) -> dict[str, Any]:
    """Status and body of the answer to a recorded request.

    Of a stream, where the machine decides how much text an event has, and of facts about the server: the fields and the
    kinds of their values.
    """
    response = app.request(
        request["method"], request["path"], headers=request["headers"], json=_with_known_tokens(request["body"])
    )
    kind = response.headers.get("content-type", "").split(";")[0]
    if kind == "application/json" and request["method"] == "POST":
        return {"status": response.status_code, "body": _steady(response.json())}
    told: dict[str, set[str]] = {}
    for line in response.text.splitlines():
        text = line.removeprefix("data: ")
        if text.startswith("{"):
            _note_kinds(json.loads(text), "", told)
        elif text:
            told.setdefault(text if kind == "text/event-stream" else kind, set())
    return {"status": response.status_code, "events": {name: sorted(kinds) for name, kinds in sorted(told.items())}}


def _note_kinds(value: Any, path: str, told: dict[str, set[str]]) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _note_kinds(one, f"{path}.{name}" if path else name, told)
    elif isinstance(value, list):
        for one in value:
            _note_kinds(one, f"{path}[]", told)
    else:
        is_telling = TELLING.search(path) and isinstance(value, str | bool)
        told.setdefault(path, set()).add(str(value) if is_telling else type(value).__name__)


def _with_known_tokens(body: Any) -> Any:
    """Token ids of the real model as such of the fake one."""
    if not isinstance(body, dict):
        return body
    return body | {name: _small(body[name]) for name in ("prompt", "input_ids") if name in body}


def _small(value: Any) -> Any:
    if isinstance(value, list):
        return [_small(one) for one in value]
    return value % VOCAB_SIZE if isinstance(value, int) else value


def _steady(value: Any) -> Any:
    """Without what changes; floats as far as every machine agrees on them. Tokens of a prompt are all of them: how many
    of them the cache had depends on who asked before."""
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:
            value = value | {"input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]}
        return {name: "…" if CHANGING.match(name) and one is not None else _steady(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_steady(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_request_gets_the_recorded_answer(apps, file):
    app = apps[file.stem in AGENTS]
    for record in json.loads(file.read_text(encoding="utf-8")):
        assert answer(app, record["request"]) == record["answer"], record["request"]


def test_an_answer_is_the_same_whoever_asked_before():
    """A request is answered twice by one server, the second time from its cache."""
    body = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "say:ab" + "p" * 100}]}
    request = {"method": "POST", "path": "/v1/messages", "headers": {}, "body": body}
    with _make_app() as app:
        first, second = answer(app, request), answer(app, request)
        raw = app.post("/v1/messages", **body).json()["usage"]
    assert raw["cache_read_input_tokens"] > 0
    assert second == first
    assert first["body"]["usage"]["input_tokens"] == raw["input_tokens"] + raw["cache_read_input_tokens"]


def test_each_client_has_left_its_record():
    assert len(FILES) >= 38


def main() -> None:
    with _make_app() as for_others, _make_app(for_agents=True) as for_agents:
        for file in FILES:
            app = for_agents if file.stem in AGENTS else for_others
            records = json.loads(file.read_text(encoding="utf-8"))
            for record in records:
                record["answer"] = answer(app, record["request"])
            file.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
