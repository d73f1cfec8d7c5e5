"""OpenAI's own client, and its models of answers, as judges of what the server sends."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from timeouts import PATIENCE_S

EXTRAS = {
    "choices": ("matched_stop", "sampling_seed", "closed_early", "unenforced", "valid", "token_ids", "explanations"),
    "message": ("reasoning_content", "reasoning"),
    "delta": ("reasoning_content", "reasoning"),
}
"""What this server says more than OpenAI's."""

BEYOND = {
    "text_completion": ("metadata", "service_tier", "ignored_fields"),
    "chat.completion": ("ignored_fields", "prompt_token_ids", "prompt_logprobs", "sglext", "timings"),
    "chat.completion.chunk": ("metadata", "ignored_fields"),
}
"""Of these the types of the client know nothing, by `object`."""


def make_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def judge(answer: dict[str, Any], *, is_chunk: bool = False) -> None:
    """Raises ValidationError where an answer, or the chunk of a stream, is not word for word as OpenAI declares it."""
    is_chat = answer["object"].startswith("chat")
    kind: Any = (ChatCompletionChunk if is_chunk else ChatCompletion) if is_chat else Completion
    plain = {name: value for name, value in answer.items() if name not in BEYOND.get(answer["object"], ())}
    plain["choices"] = [_without(choice, "choices") for choice in answer["choices"]]
    for choice in [] if is_chat else plain["choices"]:  # what the service sends and its client's types do not know:
        if is_chunk:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null until the end
        if choice["logprobs"] is not None and choice["logprobs"]["token_logprobs"][:1] == [None]:
            choice["logprobs"] = {
                name: values[1:] for name, values in choice["logprobs"].items()
            }  # nothing predicts it
    kind.model_validate(plain, strict=True, extra="forbid")


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    found = {key: one for key, one in value.items() if key not in EXTRAS[name]}
    for inner in ("message", "delta"):
        if inner in found:
            found[inner] = _without(found[inner], inner)
    return found


def joined_texts(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream of completions put together, in order."""
    found: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = found[choice["index"]]
        assert one.get("finish_reason") is None, "something came after the end"
        text, logprobs = one.get("text", ""), one.get("logprobs")
        one |= choice
        one["text"] = text + choice["text"]
        if logprobs is not None:
            one["logprobs"] = {name: logprobs[name] + choice["logprobs"][name] for name in logprobs}
    return [found[index] for index in sorted(found)]


def joined_messages(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream of chats put together, in order; calls without their ids."""
    found: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = found[choice["index"]]
        assert one.get("finish_reason") is None, "something came after the end"
        message, logprobs = one.get("message", {}), one.get("logprobs")
        one |= {name: value for name, value in choice.items() if name != "delta"} | {"message": message}
        for name in ("content", "reasoning_content", "reasoning"):
            if choice["delta"].get(name) is not None:
                message[name] = message.get(name, "") + choice["delta"][name]
        message |= {name: choice["delta"][name] for name in ("role", "refusal") if name in choice["delta"]}
        for call in choice["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if logprobs is not None:
            one["logprobs"] = one["logprobs"] | {"content": logprobs["content"] + one["logprobs"]["content"]}
    return [found[index] for index in sorted(found)]
