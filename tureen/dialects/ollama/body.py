"""Declares the bodies of Ollama's API. Fields that are not offered are refused by name.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.contract.params import INT64_MAX, JsonObject, Stops
from tureen.contract.types import LogprobSpec
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.body import convert, offered
from tureen.fields.rules import read_tables
from tureen.fields.shared import Explain, ReturnEffective
from tureen.fields.tools import MAX_TOOLS
from tureen.media.loader import MAX_REFERENCES
from tureen.requests.state import Context
from tureen.text.messages import MAX_CALLS, MAX_MESSAGES

DURATION = re.compile(r"-?((\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|\d+)", re.ASCII)
ANY_SEED = -1
MAX_TOP_LOGPROBS = 20
UNBOUNDED = (-1, -2)  # values of num_predict: without limit, and up to the context's end; both mean the latter
TABLES = read_tables(Path(__file__).with_name("fields.toml"))

PARAMETERS = {
    "num_predict": "max_new_tokens",
    "repeat_penalty": "repetition_penalty",
    "seed": "sampling_seed",
}
"""Ollama's names of sampling parameters -> those of SamplingParams."""

NOT_PARAMETERS = ("num_ctx", "explain")

Body = TypeVar("Body", bound="OllamaBody")

Images = Annotated[list[str], Meta(max_length=MAX_REFERENCES)]


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `options`."""

    num_predict: Annotated[
        int, Meta(ge=-2, description="Most tokens to generate; -1 and -2 = up to the context end.")
    ] = -1
    num_ctx: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="The context that the client needs; reported if the server's is smaller."),
    ] = None
    temperature: Annotated[float, Meta(ge=0, description="0 = greedy; higher = more varied.")] = 0.8
    top_k: Annotated[int, Meta(ge=-1, description="Keep the k most probable tokens; 0 and -1 = all.")] = 40
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Keep the smallest set of tokens whose probability reaches top_p.")
    ] = 0.9
    min_p: Annotated[float, Meta(ge=0, le=1, description="Keep tokens with p >= min_p * p_max.")] = 0.0
    typical_p: Annotated[
        float, Meta(gt=0, le=1, description="Keep the tokens whose surprise is nearest the expected one.")
    ] = 1.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="Same request, same tokens; -1 = random.")] = (
        ANY_SEED
    )
    stop: Annotated[
        str | Stops | None,
        Meta(description="Strings that end the output: up to --max-stop-strings, of 1..1024 characters."),
    ] = None
    repeat_penalty: Annotated[
        float, Meta(ge=0, le=2, description="Tokens of prompt and output: above 1 less likely, below 1 more.")
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        Meta(ge=-1, le=INT64_MAX, description="Last tokens that penalties cover; 0 = no penalties, -1 = all."),
    ] = 64
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted from the logit of a token that is in the output.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted once for each time a token is in the output.")
    ] = 0.0
    explain: Explain = False


class OllamaFunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function of a call, and its arguments."""

    name: str
    arguments: JsonObject = {}
    index: int | None = None


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call of an answer that the client sends back."""

    function: OllamaFunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes have."""

    model: Annotated[str, Meta(description="The served model or one of its adapters; `:latest` may follow.")]
    stream: Annotated[bool, Meta(description="Answer with lines of JSON, one a piece.")] = True
    options: Annotated[OllamaOptions, Meta(description="Sampling parameters.")] = OllamaOptions()
    format: Annotated[
        str | JsonObject | None,
        Meta(description="`json`, or a JSON schema: the answer is valid against it. An empty string: anything."),
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None,
        Meta(description="Whether the model thinks, for models that can switch it; without levels, a level is true."),
    ] = None
    keep_alive: Annotated[
        float | str | None,
        Meta(description="0 unloads one of several models after the answer; an only model stays, and 0 is reported."),
    ] = None
    logprobs: Annotated[
        bool, Meta(description="Return the log-probability of each token, before sampling parameters.")
    ] = False
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None,
        Meta(description="Most likely tokens at each position; needs logprobs: true."),
    ] = None
    return_effective: ReturnEffective = False

    @property
    def logprob_spec(self) -> LogprobSpec | None:
        """The log-probabilities to compute; None = none are asked for."""
        return LogprobSpec(top=self.top_logprobs or 0, mode="raw") if self.logprobs else None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /api/chat`."""

    messages: Annotated[
        list[OllamaMessage],
        Meta(max_length=MAX_MESSAGES, description="The conversation. Empty: the answer says that the model is loaded."),
    ] = []
    tools: Annotated[
        list[Any], Meta(max_length=MAX_TOOLS, description="Functions that the model may call, as OpenAI writes them.")
    ] = []


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /api/generate`."""

    prompt: Annotated[str, Meta(description="The prompt. Empty: the answer says that the model is loaded.")] = ""
    system: Annotated[str | None, Meta(description="System message.")] = None
    images: Annotated[Images, Meta(description="Pictures of the prompt, in base64.")] = []
    raw: Annotated[bool, Meta(description="Send the prompt to the model without a template.")] = False


class OllamaShowBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /api/show`, of which model or name is sent."""

    model: Annotated[str | None, Meta(description="The served model or one of its adapters.")] = None
    name: Annotated[str | None, Meta(description="Another name of model.")] = None
    verbose: Annotated[bool, Meta(description="The server has no more to show.")] = False


def parse(payload: Mapping[str, Any], kind: type[Body], context: Context) -> Body:
    """Checks a JSON body's form and returns it as `kind`. Raises InvalidRequest."""
    known = OllamaOptions.__struct_fields__
    fields = offered(payload, kind.__struct_fields__, TABLES["body"], inside=known, at="options")
    if isinstance(fields.get("options"), dict):
        fields["options"] = offered(fields["options"], known, TABLES["options"], "options")
    body = convert(fields, kind, table=TABLES["body"])
    _check(body, context)
    return body


def _check(body: OllamaBody, context: Context) -> None:
    check_context(body.options.num_ctx, context)
    if isinstance(body.format, str) and body.format not in ("", "json"):
        raise InvalidRequest(f'format must be "json" or a JSON schema, got {echo(body.format)}', field="format")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    check_keep_alive(body.keep_alive)


def check_context(needed: int | None, context: Context) -> None:
    """Reports num_ctx as ignored if the server's context is smaller than `needed`."""
    if needed is not None and needed > context.capacity:
        ignored.tell(
            "options.num_ctx", f"the server's context has {context.capacity} tokens; a longer prompt is refused"
        )


def check_keep_alive(duration: float | str | None) -> None:
    """Raises InvalidRequest for a text that is no duration."""
    if isinstance(duration, str) and not DURATION.fullmatch(duration):
        raise InvalidRequest(f"keep_alive must be a duration such as 5m, got {echo(duration)}", field="keep_alive")


def asks_to_unload(duration: float | str | None) -> bool:
    """Says whether a `keep_alive` asks to unload the model."""
    return duration == 0 or (isinstance(duration, str) and not any(digit in duration for digit in "123456789"))


def sampling_of(body: OllamaBody, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters that the body sets, by the names of SamplingParams. `payload`: the body as
    sent."""
    options = {name: value for name, value in (payload.get("options") or {}).items() if value is not None}
    fields = {
        PARAMETERS.get(name, name): getattr(body.options, name)
        for name in options
        if name in OllamaOptions.__struct_fields__ and name not in NOT_PARAMETERS
    }
    if fields.get("max_new_tokens") in UNBOUNDED:
        fields["max_new_tokens"] = None
    if fields.get("sampling_seed") == ANY_SEED:
        del fields["sampling_seed"]
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if body.format:
        fields["json_schema"] = {"type": "object"} if body.format == "json" else body.format
    return fields
