"""Plain transformers behind SGLang's `/generate`, to compare with: `python bench/transformers_server.py MODEL [PORT]`.

MODEL is a folder, or a .gguf file. Requests that wait together and have equal lengths run as one batch of `generate`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

MAX_BATCH = 16


class Job:
    def __init__(self, body: dict[str, Any]) -> None:
        self.prompt: list[int] = body["input_ids"]
        self.max_new_tokens: int = body["sampling_params"]["max_new_tokens"]
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()  # None = the end


class Fan(BaseStreamer):
    """Hands every new column of the batch to the jobs; `generate` gives it the prompts first."""

    def __init__(self, jobs: list[Job], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs, self.loop, self.prompts_seen = jobs, loop, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompts_seen:
            for job, token in zip(self.jobs, value.flatten().tolist(), strict=True):
                self.loop.call_soon_threadsafe(job.tokens.put_nowait, token)
        self.prompts_seen = True

    def end(self) -> None:
        for job in self.jobs:
            self.loop.call_soon_threadsafe(job.tokens.put_nowait, None)


class Worker:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.waiting: list[Job] = []
        self.arrived = asyncio.Event()

    async def run(self) -> None:
        while True:
            await self.arrived.wait()
            first = self.waiting[0]
            size = (len(first.prompt), first.max_new_tokens)
            batch = [job for job in self.waiting if (len(job.prompt), job.max_new_tokens) == size][:MAX_BATCH]
            self.waiting = [job for job in self.waiting if job not in batch]
            if not self.waiting:
                self.arrived.clear()
            await asyncio.to_thread(self.generate, batch, asyncio.get_running_loop())

    def generate(self, batch: list[Job], loop: asyncio.AbstractEventLoop) -> None:
        ids = torch.tensor([job.prompt for job in batch])
        count = batch[0].max_new_tokens
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            streamer=Fan(batch, loop),
        )

    async def handle(self, request: Request) -> StreamingResponse:
        job = Job(await request.json())
        self.waiting.append(job)
        self.arrived.set()
        return StreamingResponse(self.stream(job), media_type="text/event-stream")

    async def stream(self, job: Job) -> AsyncIterator[str]:
        count = 0
        while await job.tokens.get() is not None:
            count += 1
            meta = {"prompt_tokens": len(job.prompt), "completion_tokens": count, "cached_tokens": 0}
            yield f"data: {json.dumps({'text': '', 'meta_info': meta})}\n\n"
        yield "data: [DONE]\n\n"


async def main(path: Path, port: int) -> None:
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    model = AutoModelForCausalLM.from_pretrained(path.parent if gguf else path, dtype=torch.bfloat16, **gguf).eval()
    worker = Worker(model)
    facts = {"vocab_size": model.config.vocab_size}
    routes = [
        Route("/generate", worker.handle, methods=["POST"]),
        Route("/model_info", lambda request: JSONResponse(facts)),
        Route("/health", lambda request: PlainTextResponse("ok")),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="warning"))
    working = asyncio.create_task(worker.run())
    await server.serve()
    working.cancel()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 8001))
