"""Says how each kind of server is asked and how its stream is read: one class a kind."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from tureen.bench.http import BenchError, ClientConnection
from tureen.bench.workloads import BenchRequest


class Event(msgspec.Struct, frozen=True):
    """The content of one stream event. Counts are for the whole answer so far; None = this event does not tell."""

    has_tokens: bool
    text: str = ""
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    forced_tokens: int | None = None
    error: str | None = None


class ServerKind(Protocol):
    """Builds requests for one kind of server, and reads its streams."""

    path: str
    text_is_whole: bool  # an event's text is the answer so far; else what is new

    def body(self, job: BenchRequest) -> bytes:
        """Returns the request's body: greedy, streamed; EOS ignored and exactly `job.output_len` tokens, or with the
        job's schema."""

    def read(self, data: bytes) -> Event:
        """Reads one event's data (never `[DONE]`). Raises msgspec.DecodeError for what cannot be understood."""

    async def prepare(self, connection: ClientConnection) -> int | None:
        """Learns what requests need to say. Returns the vocabulary's size, None when the server does not tell."""


class _Meta(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    forced_tokens: int | None = None
    finish_reason: dict[str, Any] | None = None


class _GenerateEvent(msgspec.Struct):
    text: str = ""
    meta_info: _Meta | None = None
    error: Any = None


class Generate:
    """Asks `/generate` of tureen and SGLang."""

    path = "/generate"
    text_is_whole = True

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_GenerateEvent)

    def body(self, job: BenchRequest) -> bytes:
        field = "text" if isinstance(job.prompt, str) else "input_ids"
        ending = {"ignore_eos": True} if job.schema is None else {"json_schema": job.schema}
        params = {"temperature": 0.0, "max_new_tokens": job.output_len} | ending
        return msgspec.json.encode({field: job.prompt, "sampling_params": params, "stream": True})

    def read(self, data: bytes) -> Event:
        event = self._decoder.decode(data)
        meta = event.meta_info
        if event.error is not None or meta is None:
            return Event(False, error=_message(event.error))
        reason = meta.finish_reason
        if reason is not None and reason.get("type") not in ("length", "stop"):
            return Event(False, error=_message(reason))
        return Event(
            has_tokens=bool(meta.completion_tokens),
            text=event.text,
            output_tokens=meta.completion_tokens,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            forced_tokens=meta.forced_tokens,
        )

    async def prepare(self, connection: ClientConnection) -> int | None:
        for path in ("/model_info", "/get_model_info"):
            vocab_size = (await _get(connection, path)).get("vocab_size")
            if isinstance(vocab_size, int):
                return vocab_size
        return None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _CompletionsEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Completions:
    """Asks `/v1/completions` of anything that speaks OpenAI's API and takes token ids (vLLM, SGLang, llama.cpp, …)."""

    path = "/v1/completions"
    text_is_whole = False

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_CompletionsEvent)
        self._model = "default"

    def body(self, job: BenchRequest) -> bytes:
        ending: dict[str, Any] = {"ignore_eos": True}
        if job.schema is not None:
            schema = {"name": "answer", "schema": msgspec.Raw(job.schema.encode()), "strict": True}
            ending = {"response_format": {"type": "json_schema", "json_schema": schema}}
        fields = {
            "model": self._model,
            "prompt": job.prompt,
            "max_tokens": job.output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(fields | ending)

    def read(self, data: bytes) -> Event:
        event = self._decoder.decode(data)
        if event.error is not None:
            return Event(False, error=_message(event.error))
        # A chunk that only ends the choice has no tokens; one with empty text and no end holds part of a character.
        has_tokens = any(choice.text or choice.finish_reason is None for choice in event.choices)
        text = "".join(choice.text for choice in event.choices)
        usage = event.usage
        if usage is None:
            return Event(has_tokens, text)
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        return Event(has_tokens, text, usage.completion_tokens, usage.prompt_tokens, cached)

    async def prepare(self, connection: ClientConnection) -> int | None:
        entry = await _first_model(connection)
        self._model = str(entry.get("id", self._model))
        return _vocab_in_model_list(entry)


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _LlamaEvent(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    timings: _Timings | None = None
    error: Any = None


class LlamaCpp:
    """Asks llama.cpp's own `/completion`."""

    path = "/completion"
    text_is_whole = False

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_LlamaEvent)

    def body(self, job: BenchRequest) -> bytes:
        ending: dict[str, Any] = {"ignore_eos": True}
        if job.schema is not None:
            ending = {"json_schema": msgspec.Raw(job.schema.encode())}
        fields = {
            "prompt": job.prompt,
            "n_predict": job.output_len,
            "temperature": 0.0,
            "top_k": 1,  # the shortest way through its samplers, same token
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        return msgspec.json.encode(fields | ending)

    def read(self, data: bytes) -> Event:
        event = self._decoder.decode(data)
        if event.error is not None:
            return Event(False, error=_message(event.error))
        has_tokens = bool(event.tokens or event.content)
        if not event.stop:
            return Event(has_tokens, event.content)
        cached = event.timings.cache_n if event.timings else None
        return Event(has_tokens, event.content, event.tokens_predicted, event.tokens_evaluated, cached)

    async def prepare(self, connection: ClientConnection) -> int | None:
        return _vocab_in_model_list(await _first_model(connection))


BACKENDS: dict[str, type[ServerKind]] = {
    "tureen": Generate,
    "sglang": Generate,
    "openai": Completions,
    "llamacpp": LlamaCpp,
}


def _message(error: object) -> str:
    return msgspec.json.encode(error).decode()[:300] if error is not None else "an event without meta_info"


async def _get(connection: ClientConnection, path: str) -> dict[str, Any]:
    """Returns the JSON object at `path`; an empty one when there is none."""
    status, body = await connection.request("GET", path)
    if status == HTTPStatus.UNAUTHORIZED:
        raise BenchError(f"the server at {connection.address.url} wants an API key; give --api-key KEY")
    try:
        answer = msgspec.json.decode(body) if status == 200 else {}
    except msgspec.DecodeError:
        raise BenchError(f"{connection.address.url}{path}: the answer is not JSON; is --backend right?") from None
    return answer if isinstance(answer, dict) else {}


async def _first_model(connection: ClientConnection) -> dict[str, Any]:
    entries = (await _get(connection, "/v1/models")).get("data") or [{}]
    return dict(entries[0])


def _vocab_in_model_list(entry: dict[str, Any]) -> int | None:
    vocab_size = (entry.get("meta") or {}).get("n_vocab")  # llama.cpp's addition to the list
    return vocab_size if isinstance(vocab_size, int) else None
