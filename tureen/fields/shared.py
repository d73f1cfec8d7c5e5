"""Declares the types and limits of fields that the bodies of several APIs share."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from tureen.config import MAX_PROMPTS

T = TypeVar("T")

MAX_SALT_CHARS = 1024
MAX_TOP_LOGPROBS = 128
MAX_LOGPROB_IDS = 1024
MAX_INPUTS = 2048
"""Maximum number of texts in one body, as at OpenAI."""
MAX_TOKEN_IDS = 1 << 20
"""Maximum number of token ids in one list, checked before its content. The context length is checked later."""

PerPrompt = Annotated[list[T], Meta(max_length=MAX_PROMPTS)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKEN_IDS)]
Inputs = Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKEN_IDS, extra={"batch": MAX_INPUTS})]
"""A prompt's token ids, or a batch of prompts; `extra` says how many prompts the batch may have."""

Milliseconds = Annotated[int, Meta(ge=1, le=2**53)]
ReturnEffective = Annotated[
    bool, Meta(description="Return every sampling parameter in effect, and the source of its value.")
]
Explain = Annotated[
    bool,
    Meta(description="Explain each output token: its candidates after every stage of sampling, and the random number."),
]
LogMetrics = Annotated[bool, Meta(description="false: this request does not count in the metrics.")]
Priority = Annotated[
    int, Meta(ge=-(2**31), le=2**31 - 1, description="Higher runs first; needs --enable-priority-scheduling.")
]
CacheKey = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
CacheSalt = Annotated[str, Meta(description="Separates the prefix cache.", max_length=MAX_SALT_CHARS)]
Deadline = Annotated[Milliseconds | None, Meta(description="Wall-clock limit from arrival to the end.")]
FirstTokenDeadline = Annotated[
    Milliseconds | None, Meta(description="Wall-clock limit from arrival to the first token.")
]
LogprobsModeField = Annotated[
    Literal["processed", "raw"],
    Meta(description="processed = after penalties, bias and temperature; raw = the model's own."),
]
KeptTokens = Annotated[
    Annotated[int, Meta(ge=-1)] | None,
    Meta(description="Keep at most this number of tokens of each text; -1 = up to the context."),
]
AbortName = Annotated[str | None, Meta(description="A name by which the request can be aborted.")]
