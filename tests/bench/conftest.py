"""A server without a model that speaks all three dialects, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from timeouts import PATIENCE_S, wait_until

VOCAB = 1000


@dataclass
class FakeServer:
    first_token_s: float = 0.0
    token_s: float = 0.0
    extra_tokens: int = 0  # more than asked
    together: int = 0  # requests without which none is answered
    refuse_after: int | None = None  # running requests, then 503
    die_after: int | None = None  # tokens, then the connection is cut
    error_after: int | None = None  # tokens, then an error event
    structured: tuple[str, ...] = ("{", '"a"', ": ", "1", "}")  # tokens of the answer to a request with a schema
    forced: int | None = None  # how many of those the server says it forced
    requests: list[dict] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda request: PlainTextResponse("ok")),
                Route("/model_info", lambda request: JSONResponse({"vocab_size": VOCAB})),
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "m", "meta": {"n_vocab": VOCAB}}]})),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/completion", self.llama, methods=["POST"]),
            ]
        )

    async def generate(self, request: Request):
        body = await request.json()
        params = body["sampling_params"]
        prompt = body["text"] if "text" in body else body["input_ids"]
        pieces = self._pieces("json_schema" in params, params["max_new_tokens"])
        wanted = len(pieces)

        def event(count: int) -> dict:
            reason = {"type": "length", "length": wanted} if count == wanted else None
            meta = {
                "prompt_tokens": len(prompt),
                "completion_tokens": count,
                "cached_tokens": 3,
                "finish_reason": reason,
            }
            if self.forced is not None:
                meta["forced_tokens"] = min(count, self.forced)
            return {"text": "".join(pieces[:count]), "output_ids": [7] * count, "meta_info": meta}

        return self._answer(body, wanted, event, done=True)

    async def completions(self, request: Request):
        body = await request.json()
        pieces = self._pieces("response_format" in body, body["max_tokens"])
        wanted = len(pieces)
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": wanted,
            "prompt_tokens_details": {"cached_tokens": 3},
        }

        def event(count: int) -> dict:
            return {"choices": [{"text": pieces[count - 1], "finish_reason": None}]}

        last = {"choices": [{"text": "", "finish_reason": "length"}]}
        return self._answer(body, wanted, event, done=True, tail=[last, {"choices": [], "usage": usage}])

    async def llama(self, request: Request):
        body = await request.json()
        pieces = self._pieces("json_schema" in body, body["n_predict"])
        wanted = len(pieces)

        def event(count: int) -> dict:
            return {"content": pieces[count - 1], "tokens": [7], "stop": False, "tokens_predicted": count}

        last = {
            "content": "",
            "tokens": [],
            "stop": True,
            "tokens_predicted": wanted,
            "tokens_evaluated": len(body["prompt"]),
            "timings": {"cache_n": 3},
        }
        return self._answer(body, wanted, event, done=False, tail=[last])

    def _pieces(self, is_structured: bool, length: int) -> list[str]:
        return list(self.structured) if is_structured else ["x"] * (length + self.extra_tokens)

    def _answer(self, body, wanted, event, *, done, tail=()):
        self.requests.append(body)
        if self.refuse_after is not None and self.running >= self.refuse_after:
            return JSONResponse({"error": {"message": "queue full"}}, status_code=503)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return StreamingResponse(self._stream(wanted, event, done, tail), media_type="text/event-stream")

    async def _stream(self, wanted, event, done, tail):
        try:
            while len(self.requests) < self.together:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.first_token_s)
            for count in range(1, wanted + 1):
                if count - 1 == self.error_after:
                    yield _frame({"error": {"message": "the model failed"}})
                    return
                if count - 1 == self.die_after:
                    raise ConnectionResetError
                yield _frame(event(count))
                await asyncio.sleep(self.token_s)
            for last in tail:
                yield _frame(last)
            if done:
                yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1


def _frame(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.fixture
def fake_server():
    server = FakeServer()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server.port = listening.getsockname()[1]
        config = uvicorn.Config(server.app(), log_level="critical", lifespan="off")
        instance = uvicorn.Server(config)
        thread = threading.Thread(target=instance.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_until(lambda: instance.started, "the start")
        yield server
        instance.should_exit = True
        with contextlib.suppress(RuntimeError):
            thread.join(PATIENCE_S)
