"""An application with a folder of files and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app_under_test import App

ROUTE = "/v1/completions"


class BatchApp(App):
    """Its batches go on whenever a test lets the event loop run. `key`: of the client that asks."""

    key: str | None = None

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(batch_path=str(folder), **settings)
        self.run(self._start())

    async def _start(self) -> None:
        self.state.lifecycle.start()

    @property
    def service(self) -> Any:
        [service] = [service for service in self.state.lifecycle.services if hasattr(service, "runner")]
        return service

    def request(self, method: str, path: str, **how: Any) -> Any:
        if self.key is not None:
            how = {"headers": {"Authorization": f"Bearer {self.key}"}} | how
        return super().request(method, path, **how)

    def send(self, text: str | bytes, name: str = "in.jsonl", **fields: str) -> Any:
        data = text.encode() if isinstance(text, str) else text
        files = {"file": (name, data, "application/jsonl")}
        return self.request("POST", "/v1/files", data={"purpose": "batch"} | fields, files=files)

    def upload(self, text: str | bytes, name: str = "in.jsonl", **fields: str) -> dict[str, Any]:
        response = self.send(text, name, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def begin(self, lines: list[dict] | str | bytes, endpoint: str = ROUTE, **fields: Any) -> dict[str, Any]:
        text = "".join(json.dumps(line) + "\n" for line in lines) if isinstance(lines, list) else lines
        body = {"input_file_id": self.upload(text)["id"], "endpoint": endpoint, "completion_window": "24h"} | fields
        response = self.post("/v1/batches", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str) -> Any:
        return self.request("GET", path).json()

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.get(f"/v1/batches/{batch['id']}")

    def ended(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch when it has ended."""
        self.wait_until(lambda: batch["id"] not in self.service.runner._jobs)
        return self.batch(batch)

    def lines(self, file_id: str | None) -> dict[str, Any]:
        """The lines of a file of answers, by custom_id."""
        if file_id is None:
            return {}
        text = self.request("GET", f"/v1/files/{file_id}/content").text
        assert text.endswith("\n")
        lines = [json.loads(line) for line in text.splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines), "a line twice"
        assert len({line["id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


def line(custom_id: str, url: str = ROUTE, **body: Any) -> dict[str, Any]:
    body = {"prompt": "say:hello", "max_tokens": 9, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
