"""Builds the parts that answers of OpenAI's generating routes share: head, usage, token texts, streams of chunks."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from tureen import __version__
from tureen.dialects.openai.body import OpenAIBody
from tureen.errors import echo
from tureen.fields.ignored import answer_field
from tureen.http.dialect import streamed
from tureen.http.errors import error_object
from tureen.http.sse import DONE, EventStream, event
from tureen.log import get_logger
from tureen.requests import planning
from tureen.requests.generation import Output
from tureen.requests.state import Context
from tureen.text.tokenizer import Tokenizer

Answer = dict[str, Any]

log = get_logger("api")

encode = msgspec.json.Encoder().encode


def name_of(body: OpenAIBody, prefix: str) -> str:
    """Returns the id of an answer, by which its request can be aborted: the client's, or a new one with `prefix`.

    Raises InvalidRequest.
    """
    field = "request_id" if body.rid is None else "rid"
    rid = getattr(body, field)
    if rid is not None:
        planning.check_rid(rid, field)
    name = f"{prefix}{uuid.uuid4().hex}" if rid is None else rid
    for user in (body.user, body.safety_identifier):
        if user is not None:
            log.debug("request %s is for user %s", echo(name), echo(user))
    return name


def head(name: str, kind: str, body: OpenAIBody, context: Context) -> Answer:
    """Returns the fields that begin an answer and each chunk of a stream. `kind`: the value of `object`."""
    fields: Answer = {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": body.model or context.info.model_name,
        "system_fingerprint": f"tureen-{__version__}-{context.config.weight_version}",
    }
    return fields if body.service_tier is None else fields | {"service_tier": "default"}


def metadata(body: OpenAIBody, context: Context, **notes: str) -> Answer:
    """Returns `metadata`: the client's own, the version of the weights, and `notes`; and beside it the list of
    the fields that had no effect."""
    own = {**(body.metadata or {}), "weight_version": context.config.weight_version, **notes}
    return {"metadata": own, **answer_field()}


def ending(output: Output) -> Answer:
    """Returns the fields of a choice that has ended which OpenAI does not have: the matched stop, the seed to repeat
    it, what of its constraint was not enforced, and how it was sampled."""
    matched = None if output.finish is None else output.finish.pattern or output.finish.matched
    return {"matched_stop": matched, "sampling_seed": output.request.seed, **output.ending_notes}


def usage(outputs: Sequence[Output], num_samples: int, num_reasoning: int = 0) -> Answer:
    """Returns OpenAI's `usage` of all outputs, which are ordered by prompt; each prompt counts once for all its
    samples."""
    prompts = [outputs[start : start + num_samples] for start in range(0, len(outputs), num_samples)]
    num_prompt = sum(samples[0].usage.prompt_tokens for samples in prompts)
    num_output = sum(len(output.token_ids) for output in outputs)
    num_cached = sum(min(output.usage.cached_tokens for output in samples) for samples in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a token as OpenAI's log-probabilities show it: its text, or `bytes:` and hex bytes when it is not whole
    characters."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class StreamUsage:
    """Builds the `usage` of a stream's chunks, as `stream_options` asks for it."""

    def __init__(self, body: OpenAIBody, outputs: Sequence[Output], num_samples: int) -> None:
        options = body.stream_options
        self.at_end = options is not None and bool(options.include_usage)
        self._always = options is not None and bool(options.continuous_usage_stats)
        self._outputs = outputs
        self._num_samples = num_samples

    def so_far(self, num_reasoning: int = 0) -> Answer:
        """Returns the usage field for a chunk with choices; {} when it has none."""
        if self._always:
            return {"usage": usage(self._outputs, self._num_samples, num_reasoning)}
        return {"usage": None} if self.at_end else {}

    def whole(self, num_reasoning: int = 0) -> Answer:
        """Returns the fields of the last chunk, which has no choices."""
        return {"choices": [], "usage": usage(self._outputs, self._num_samples, num_reasoning)}


async def open_stream(request: Request, chunks: AsyncGenerator[Answer, None]) -> EventStream:
    """Returns the chunks as server-sent events. Raises the error that comes before the first chunk."""
    return await streamed(request, _events(chunks), lambda error: event(encode(error_object(error))), end=DONE)


async def _events(chunks: AsyncGenerator[Answer, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield event(encode(chunk))
