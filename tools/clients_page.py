"""docs/clients.md, from what `make test-clients ARGS=--record` saw of each client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RUNS = Path(__file__).resolve().parent.parent / "tests" / "golden" / "client_runs.json"
INTRO = """\
```
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")
print(client.chat.completions.create(model="default", messages=[{"role": "user", "content": "Hello"}]))
```

These clients of other projects ran against a real server, unmodified: `make test-clients` runs them again, with their
newest versions. What each of them sends is kept, and answered in `make test` as it was answered here.

A client's row says which fields that it sends have no effect here (they are accepted, and named in the header
`x-tureen-ignored`), and which requests are refused. The refused ones are those that its checks make wrong on purpose,
unless a note says otherwise."""


def clients_page(generated: str) -> str:
    """Returns the page. `generated`: the comment that such pages begin with."""
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    clients = sorted(runs.values(), key=lambda run: str(run["title"]).lower())
    parts = ["# Clients", "", generated, "", INTRO, "", "| client | version | has no effect |", "|---|---|---|"]
    parts += [f"| {run['title']} | {_versions(run)} | {_names(run['told'])} |" for run in clients]
    for run in clients:
        with_what = f"Computed with {run['computed_with']}."
        lists = (("Ran", run["checks"]), ("Refused", run["refused"]), ("Note", run.get("notes", [])))
        parts += ["", f"## {run['title']}", "", with_what]
        for title, items in lists:
            parts += ["", f"{title}:", "", *(f"- {item}" for item in items)] if items else []
    return "\n".join([*parts, ""])


def _versions(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()))


def _names(fields: list[str]) -> str:
    return ", ".join(f"`{field}`" for field in fields) or "–"
