"""`tureen.Engine`: the same answers as over HTTP, without a server.

Imports: build, config, config_facts, config_sources, dialects, errors, log, metrics, requests, serving,
struct_warm_up; asyncio, msgspec.
Imported by: bench, cli.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from tureen.build import connect, find_model, media_loader
from tureen.config import Config
from tureen.config_facts import is_alone
from tureen.config_sources import load
from tureen.dialects.sglang import generate as sglang
from tureen.dialects.sglang.generate import Answer
from tureen.errors import Unavailable
from tureen.log import Progress, no_progress
from tureen.metrics import Metrics
from tureen.requests.state import ServerState, make_context
from tureen.serving.client import EngineClient
from tureen.struct_warm_up import warm_up_structs

T = TypeVar("T")


class OfflineEngine:
    """A model ready to generate; a context manager. Settings are those of `tureen serve`, by their Python names.

    Raises StartupError when it cannot start; its methods raise InvalidRequest and the rest of tureen.errors.
    """

    def __init__(self, config: Config | None = None, /, *, progress: Progress = no_progress, **settings: Any) -> None:
        self._config = load(settings, environment={}) if config is None else msgspec.structs.replace(config, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tureen", daemon=True)
        self._thread.start()
        self._is_shut_down = False
        try:
            self._client, self._state = self._wait(self._connect(progress))
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Returns one answer, or a list for a batch or n > 1; with `stream`, an iterator of them as they grow.

        `fields` are those of `POST /generate`: input_ids, return_logprob, …
        """
        self._check_running()
        body = _body(prompt, sampling_params, stream, fields)
        return self._iterate(body) if stream else self._wait(self._answer(body))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        stream: bool = False,
        **fields: Any,
    ) -> Any:
        """Does what `generate` does, for asynchronous callers; with `stream`, returns an asynchronous iterator."""
        self._check_running()
        body = _body(prompt, sampling_params, stream, fields)
        if stream:
            return self._iterate_async(body)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(body), self._loop))

    def encode(self, prompt: str | list[str] | None = None, **fields: Any) -> Any:
        """Returns the prompt's embedding, {"embedding", "meta_info"}, or a list of them for a batch; as `POST
        /encode`."""
        self._check_running()
        return self._wait(self._embed(fields | {"text": prompt}))

    def open_session(self, capacity_of_str_len: int, *, session_id: str | None = None) -> str:
        """Opens a session for `session_params`, as `POST /open_session` does; returns its id."""
        self._check_running()
        sessions = self._state.sessions
        return self._wait(_later(lambda: sessions.open(capacity_of_str_len, owner="", name=session_id)))

    def close_session(self, session_id: str) -> None:
        """Closes a session. Raises NotFound for one that is not open."""
        self._check_running()
        self._wait(_later(lambda: self._state.sessions.close(session_id, owner="")))

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, str]:
        """Loads an adapter from the folder `lora_path`; requests name it by `lora_path=lora_name`.

        Returns all that are loaded then, name -> folder.
        """
        self._check_running()
        return self._wait(self._state.change_adapters("load_adapter", name=lora_name, path=lora_path))

    def unload_lora_adapter(self, lora_name: str) -> dict[str, str]:
        """Unloads an adapter. Returns what is loaded then, name -> folder. Raises NotFound, and Conflict while requests
        use it."""
        self._check_running()
        return self._wait(self._state.change_adapters("unload_adapter", name=lora_name))

    def flush_cache(self) -> object:
        """Forgets all cached prefixes; returns the number of pages freed."""
        self._check_running()
        return self._wait(self._client.call("flush_cache"))

    def shutdown(self) -> None:
        """Stops the engine and frees what it holds. A second call does nothing."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._wait(self._client.close())
            self._wait(self._state.common.close())
            self._stop_loop()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    async def _connect(self, progress: Progress) -> tuple[EngineClient, ServerState]:
        model = await asyncio.to_thread(find_model, self._config, progress=progress)
        media = media_loader(self._config, model)
        is_one = is_alone(self._config)
        start = connect if is_one else importlib.import_module("tureen.data_parallel.start").connect
        client: EngineClient = await start(self._config, model, progress=progress)
        warm_up_structs()
        try:
            context = make_context(model.tokenizer, client.info, self._config, media)
            return client, ServerState(client, context, Metrics(client.info.model_name), media)
        except BaseException:
            await client.close()
            raise

    async def _answer(self, body: dict[str, Any]) -> Answer | list[Answer]:
        answers = await sglang.answer(await sglang.prepare(body, self._state), self._state)
        plain: Answer | list[Answer] = sglang.as_builtins(answers)
        return plain

    async def _embed(self, body: dict[str, Any]) -> Answer | list[Answer]:
        plan = await sglang.prepare(sglang.embedding_body(body), self._state, takes_media=False)
        return await sglang.embed(plan, self._state)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[Answer]:
        answers = sglang.stream(await sglang.prepare(body, self._state), self._state)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield sglang.as_builtins(answer)

    def _iterate(self, body: dict[str, Any]) -> Iterator[Answer]:
        answers: Any = self._stream(body)
        try:
            while (answer := self._wait(anext(answers, None))) is not None:
                yield answer
        finally:
            if not self._is_shut_down:
                self._wait(answers.aclose())

    async def _iterate_async(self, body: dict[str, Any]) -> AsyncIterator[Answer]:
        answers: Any = self._stream(body)
        try:
            while (answer := await self._hand_over(anext(answers, None))) is not None:
                yield answer
        finally:
            if not self._is_shut_down:
                await self._hand_over(answers.aclose())

    def _wait(self, work: Awaitable[T]) -> T:
        return asyncio.run_coroutine_threadsafe(_as_coroutine(work), self._loop).result()

    async def _hand_over(self, work: Awaitable[T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_as_coroutine(work), self._loop))

    def _check_running(self) -> None:
        if self._is_shut_down:
            raise Unavailable("the engine was shut down; create a new one", code="shut_down")

    def _stop_loop(self) -> None:
        self._wait(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _later(call: Callable[[], T]) -> T:
    """Makes a plain call, in the event loop's thread."""
    return call()


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work


def _body(
    prompt: str | list[str] | None,
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
    stream: bool,
    fields: dict[str, Any],
) -> dict[str, Any]:
    return fields | {"text": prompt, "sampling_params": sampling_params, "stream": stream}
