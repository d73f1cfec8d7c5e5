"""Sends a load to a server and notes when every token arrives."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from tureen.bench.backends import ServerKind
from tureen.bench.http import Address, BenchError, ClientConnection, HttpError
from tureen.bench.workloads import BenchRequest, OfferedLoad

REQUEST_TIMEOUT_S = 600.0


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. Times are in seconds of one monotonic clock."""

    started_s: float
    token_times_s: list[float]  # arrival of every event that carried tokens
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None  # by the server's own count
    forced_tokens: int | None = None  # likewise: output tokens that were appended without being decoded
    text: str = ""
    refused: bool = False


async def run_load(address: Address, backend: ServerKind, load: OfferedLoad) -> list[FinishedRequest]:
    """Returns all answers, in the order of the jobs. Raises BenchError as soon as one is not what was asked for."""
    if load.arrivals_s is not None:
        return await _open_loop(address, backend, load, load.arrivals_s)
    return await _closed_loop(address, backend, load)


async def _closed_loop(address: Address, backend: ServerKind, load: OfferedLoad) -> list[FinishedRequest]:
    answers: dict[int, FinishedRequest] = {}
    jobs = iter(enumerate(load.jobs))

    async def client() -> None:
        connection = ClientConnection(address)
        try:
            for index, job in jobs:
                answers[index] = await ask(connection, backend, job, may_refuse=load.may_refuse)
        finally:
            connection.close()

    await _together([client() for _ in range(min(load.concurrency, len(load.jobs)))])
    return [answers[index] for index in range(len(load.jobs))]


async def _open_loop(
    address: Address, backend: ServerKind, load: OfferedLoad, arrivals_s: list[float]
) -> list[FinishedRequest]:
    answers: dict[int, FinishedRequest] = {}
    idle: deque[ClientConnection] = deque()
    start = time.perf_counter()

    async def client(index: int, job: BenchRequest) -> None:
        await asyncio.sleep(start + arrivals_s[index] - time.perf_counter())
        connection = idle.pop() if idle else ClientConnection(address)
        answers[index] = await ask(connection, backend, job, may_refuse=load.may_refuse)
        idle.append(connection)

    try:
        await _together([client(index, job) for index, job in enumerate(load.jobs)])
    finally:
        for connection in idle:
            connection.close()
    return [answers[index] for index in range(len(load.jobs))]


async def _together(clients: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs until all are done; the first error ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def ask(
    connection: ClientConnection, backend: ServerKind, job: BenchRequest, *, may_refuse: bool = False
) -> FinishedRequest:
    """Streams one request and checks its length. Raises BenchError naming what was wrong with the answer.

    may_refuse: whether a 503 counts as a finished request.
    """
    url = connection.address.url + backend.path
    body = backend.body(job)
    started = time.perf_counter()
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return _checked(await _stream(connection, backend, body, started), job, url)
    except HttpError as error:
        if may_refuse and error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return FinishedRequest(
                started_s=started,
                token_times_s=[],
                ended_s=time.perf_counter(),
                prompt_tokens=0,
                output_tokens=0,
                refused=True,
            )
        raise BenchError(f"{url}: {error}") from None
    except TimeoutError:
        raise BenchError(f"{url}: the answer did not end within {REQUEST_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise BenchError(f"{url}: {error}") from None
    except msgspec.DecodeError as error:
        raise BenchError(f"{url}: an event that is not this backend's: {error}; is --backend right?") from None


async def _stream(connection: ClientConnection, backend: ServerKind, body: bytes, started: float) -> FinishedRequest:
    times: list[float] = []
    text = ""
    output_tokens = prompt_tokens = cached_tokens = forced_tokens = None
    async for data in connection.events(backend.path, body):
        now = time.perf_counter()
        if data == b"[DONE]":
            continue
        event = backend.read(data)
        if event.error is not None:
            raise BenchError(f"{connection.address.url}{backend.path}: {event.error}")
        if event.has_tokens and (event.output_tokens is None or event.output_tokens != output_tokens):
            times.append(now)
        output_tokens = event.output_tokens if event.output_tokens is not None else output_tokens
        prompt_tokens = event.prompt_tokens if event.prompt_tokens is not None else prompt_tokens
        cached_tokens = event.cached_tokens if event.cached_tokens is not None else cached_tokens
        forced_tokens = event.forced_tokens if event.forced_tokens is not None else forced_tokens
        text = event.text if backend.text_is_whole else text + event.text
    return FinishedRequest(
        started_s=started,
        token_times_s=times,
        ended_s=time.perf_counter(),
        prompt_tokens=-1 if prompt_tokens is None else prompt_tokens,
        output_tokens=-1 if output_tokens is None else output_tokens,
        cached_tokens=cached_tokens,
        forced_tokens=forced_tokens,
        text=text,
    )


def _checked(answer: FinishedRequest, job: BenchRequest, url: str) -> FinishedRequest:
    """Returns the answer. Raises BenchError where its length is another than asked for: then the server's work is not
    the same, and no figure of it may be shown."""
    prompt_tokens = len(job.prompt) if isinstance(job.prompt, list) else max(1, answer.prompt_tokens)
    output_tokens = job.output_len if job.schema is None else max(1, min(answer.output_tokens, job.output_len))
    for what, got, asked in (
        ("prompt", answer.prompt_tokens, prompt_tokens),
        ("output", answer.output_tokens, output_tokens),
    ):
        if got != asked:
            said = "did not say how many" if got < 0 else f"counted {got}"
            raise BenchError(f"{url}: asked for {asked} {what} tokens, the server {said}")
    if not answer.token_times_s:
        raise BenchError(f"{url}: {answer.output_tokens} tokens, but no event carried them")
    return answer
