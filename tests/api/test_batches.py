"""`/v1/batches`: lines of a file, answered as their routes answer, when nobody else asks for anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from app_under_test import App

ROUTE = "/v1/completions"


class BatchApp(App):
    """An application whose batches run whenever a test lets time pass."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(batch_path=str(folder), **settings)
        self.run(self._start())

    async def _start(self) -> None:
        self.state.lifecycle.start()

    def upload(self, text: str | bytes, name: str = "in.jsonl", **headers: str) -> dict[str, Any]:
        data = text.encode() if isinstance(text, str) else text
        files = {"file": (name, data, "application/jsonl")}
        response = self.request("POST", "/v1/files", data={"purpose": "batch"}, files=files, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def begin(self, lines: list[dict] | str | bytes, endpoint: str = ROUTE, **fields: Any) -> dict[str, Any]:
        text = "".join(json.dumps(line) + "\n" for line in lines) if isinstance(lines, list) else lines
        body = {"input_file_id": self.upload(text)["id"], "endpoint": endpoint, "completion_window": "24h"} | fields
        response = self.post("/v1/batches", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.request("GET", f"/v1/batches/{batch_id}").json()

    def ended(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch when it has ended."""
        self.wait_until(lambda: batch["id"] not in self.state.lifecycle.services[0].runner._jobs)
        return self.batch(batch["id"])

    def lines(self, file_id: str) -> dict[str, Any]:
        """The lines of a file of answers, by custom_id."""
        text = self.request("GET", f"/v1/files/{file_id}/content").text
        assert text.endswith("\n")
        lines = [json.loads(line) for line in text.splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


@pytest.fixture
def app(tmp_path):
    with BatchApp(tmp_path / "batches") as running:
        yield running


def line(custom_id: str, url: str = ROUTE, **body: Any) -> dict[str, Any]:
    body = body or {"prompt": "say:hello", "max_tokens": 5, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_each_line_is_answered_as_its_route_answers(app):
    batch = app.begin([line(f"r{index}") for index in range(20)])
    assert batch["status"] == "validating"
    ended = app.ended(batch)
    assert ended["status"] == "completed", ended
    assert not ended["error_file_id"], app.lines(ended["error_file_id"])
    assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    answers = app.lines(ended["output_file_id"])
    alone = app.post(ROUTE, **line("x")["body"]).json()
    for answer in answers.values():
        body = answer["response"]["body"]
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        assert body["choices"][0]["text"] == alone["choices"][0]["text"]
        assert body["usage"] == alone["usage"]
