"""docs/clients.md, from what `make test-clients ARGS=--record` saw of each client."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
RUNS, SETUP = TESTS / "golden" / "client_runs.json", TESTS / "clients" / "setup.toml"
ADDRESS = "http://127.0.0.1:30000"
INTRO = """\
```
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")
print(client.chat.completions.create(model="default", messages=[{"role": "user", "content": "Hello"}]))
```

These clients of other projects ran unmodified against a server of the default model. `make test-clients` runs them
again with their newest versions. `make test` sends what they sent, and expects the same answers.

Coding agents, LibreChat and Open WebUI send more instructions than the default model can follow. Their server has a
chat template that shows the model the last message and little else
([decision 152](decisions/0152-agents-ask-a-small-model-with-a-short-template.md))."""
FIELDS = """\
## Fields without effect

These fields are accepted, have no effect here, and are named in the header
[`x-tureen-ignored`](fields-that-have-no-effect.md)."""


def clients_page(generated: str) -> str:
    """Return the page. `generated`: the comment that such pages begin with."""
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    setup = tomllib.loads(SETUP.read_text(encoding="utf-8").replace("ADDRESS", ADDRESS))
    clients = sorted(runs.items(), key=lambda entry: str(entry[1]["title"]).lower())
    parts = ["# Clients", "", generated, "", INTRO, ""]
    parts += ["| client | version | what to type | what ran | result |", "|---|---|---|---|---|"]
    parts += [
        f"| {run['title']} | {_versions(run)} | {_code(setup[name]['setup'])} | {setup[name]['ran']} | {_result(run)} |"
        for name, run in clients
    ]
    parts += ["", FIELDS, "", "| client | fields |", "|---|---|"]
    parts += [f"| {run['title']} | {', '.join(map(_code, run['told']))} |" for _, run in clients if run["told"]]
    parts += ["", "## Notes", ""]
    parts += [f"- {run['title']}: {note}" for _, run in clients for note in run.get("notes", [])]
    return "\n".join([*parts, ""])


def _versions(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()))


def _result(run: dict[str, Any]) -> str:
    failed = run.get("failed", [])
    return f"failed: {'; '.join(failed)}" if failed else "passed"


def _code(text: str) -> str:
    return f"`{text}`"
