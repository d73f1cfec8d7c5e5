"""Declares the bodies of `/completion` and `/infill`, and turns them into prompts and sampling parameters.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.config import MAX_N, MAX_PROMPTS
from tureen.contract.params import INT64_MAX, MAX_LOGIT_BIAS, JsonObject, Stops
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.body import convert, offered, require_equal
from tureen.fields.rules import read_tables
from tureen.fields.shared import MAX_TOKEN_IDS, MAX_TOP_LOGPROBS
from tureen.requests import planning, tokenising
from tureen.requests.prompts import Prompt, id_lists, too_long
from tureen.requests.state import Context
from tureen.text.tokenizer import Tokenizer

TABLES = read_tables(Path(__file__).with_name("fields.toml"))
RANDOM_SEEDS = (-1, 2**32 - 1)
LEAST_BIAS = -100.0
"""The bias of a token that `false` forbids."""

MAX_BIAS_CHARS, MAX_PATH_CHARS = 256, 256
"""Most characters of a text that is biased, and of an entry of `response_fields`."""

DEFAULTS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_last_n": 64, "max_new_tokens": None,
}  # fmt: skip
SAMPLERS: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_last_n": 0},
    "top_k": {"top_k": -1},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "dry": {}, "top_n_sigma": {}, "xtc": {}, "infill": {},
}  # fmt: skip
"""llama.cpp's samplers, each with the parameters that switch it off. Those without parameters are not here."""

SAMPLER_LETTERS = dict(zip("ekypmtdsxi", SAMPLERS, strict=True))
MAX_INDENT = 1024

PARAMETERS = {
    "n_predict": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "typ_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "seed": "sampling_seed",
    "ignore_eos": "ignore_eos",
    "n_cmpl": "n",
    "n": "n",
    "grammar": "ebnf",
    "json_schema": "json_schema",
    "logit_bias": "logit_bias",
}
"""llama.cpp's names of sampling parameters -> those of SamplingParams. Two names of one in a body must be equal."""

SHOWN_PARAMETERS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty",
    "frequency_penalty", "ignore_eos",
)  # fmt: skip
"""The parameters that an answer shows in its generation_settings, as they acted."""

B = TypeVar("B", bound="LlamaOptions")


class LlamaPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt as an object."""

    prompt_string: str
    multimodal_data: Annotated[list[Any], Meta(max_length=MAX_PROMPTS)] = []


MAX_PIECES = 4096
"""Most pieces of a prompt that mixes texts and token ids."""
Mixed = Annotated[list[int | str], Meta(max_length=MAX_TOKEN_IDS, extra={"batch": MAX_PIECES})]
Prompts = (
    str
    | Annotated[list[int | str | Mixed | LlamaPrompt], Meta(max_length=MAX_TOKEN_IDS, extra={"batch": MAX_PROMPTS})]
    | LlamaPrompt
)
Biases = Annotated[dict[str, float | Literal[False]], Meta(max_length=MAX_LOGIT_BIAS)]
BiasPair = Annotated[list[int | str | float | bool], Meta(min_length=2, max_length=2)]


class LlamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that `/completion` and `/infill` share."""

    model: Annotated[str | None, Meta(description="The served model, or an adapter.")] = None
    n_predict: Annotated[int, Meta(ge=-1, description="Most tokens to generate; -1 = up to the context's end.")] = -1
    max_tokens: Annotated[int, Meta(ge=-1, description="Another name of n_predict.")] = -1
    temperature: Annotated[float, Meta(description="0 and less = greedy; higher = more varied.")] = 0.8
    top_k: Annotated[int, Meta(ge=-1, description="Keep the k most probable tokens; 0 and -1 = all.")] = 40
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Keep the smallest set of tokens whose probability reaches top_p.")
    ] = 0.95
    min_p: Annotated[float, Meta(ge=0, le=1, description="Keep tokens with p >= min_p * p_max.")] = 0.05
    typical_p: Annotated[
        float, Meta(gt=0, le=1, description="Keep the tokens whose surprise is nearest the expected one.")
    ] = 1.0
    typ_p: Annotated[float, Meta(gt=0, le=1, description="Another name of typical_p.")] = 1.0
    repeat_penalty: Annotated[
        float, Meta(gt=0, le=2, description="Tokens of prompt and output: above 1 less likely, below 1 more.")
    ] = 1.0
    repeat_last_n: Annotated[
        int, Meta(ge=-1, le=INT64_MAX, description="Last tokens that penalties cover; 0 = no penalties, -1 = all.")
    ] = 64
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted from the logit of a token that is in the output.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted once for each time a token is in the output.")
    ] = 0.0
    stop: Annotated[str | Stops, Meta(description="Strings that end the output; they are not in the text.")] = (
        msgspec.field(default_factory=list)
    )
    seed: Annotated[
        int, Meta(ge=-(2**63), le=2**63 - 1, description="Same request, same tokens; -1 and 4294967295 = random.")
    ] = -1
    ignore_eos: Annotated[bool, Meta(description="EOS does not end the output.")] = False
    grammar: Annotated[str, Meta(description="The output matches this GBNF grammar.")] = ""
    json_schema: Annotated[
        JsonObject | None, Meta(description="The output is JSON that is valid against this schema.")
    ] = None
    logit_bias: Annotated[
        Biases | Annotated[list[BiasPair], Meta(max_length=MAX_LOGIT_BIAS)],
        Meta(description="A list of [token id or text, bias], or an object of them; false forbids the token."),
    ] = msgspec.field(default_factory=dict)
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_N, description="Outputs of each prompt, at most --max-n.")] = 1
    n: Annotated[int, Meta(ge=1, le=MAX_N, description="Another name of n_cmpl.")] = 1
    n_probs: Annotated[
        int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description="Return the log-probabilities of this many best tokens.")
    ] = 0
    samplers: Annotated[
        str | Annotated[list[str], Meta(max_length=64)],
        Meta(description="Samplers that act, by their names or as a text of their letters; none = all."),
    ] = ""
    n_indent: Annotated[
        int,
        Meta(ge=0, le=MAX_INDENT, description="End the output before a line that is indented by less; 0 = no bound."),
    ] = 0
    t_max_predict_ms: Annotated[
        int,
        Meta(
            ge=-(2**63),
            le=INT64_MAX,
            description="End the output at the first line break after this many milliseconds from its first token; 0 "
            "and less = no limit.",
        ),
    ] = -1
    stream: Annotated[bool, Meta(description="Answer with server-sent events, one a token.")] = False
    return_tokens: Annotated[bool, Meta(description="Return the output's token ids.")] = False
    timings_per_token: Annotated[bool, Meta(description="Each event of a stream has timings.")] = False
    return_progress: Annotated[
        bool, Meta(description="Events of a stream say how much of a long prompt is computed.")
    ] = False
    response_fields: Annotated[
        Annotated[list[Annotated[str, Meta(max_length=MAX_PATH_CHARS)]], Meta(max_length=64)] | None,
        Meta(description="Return only these fields; `a/b` is the field b of a."),
    ] = None


class LlamaCompletionBody(LlamaOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /completion`."""

    prompt: Annotated[
        Prompts, Meta(description="A text, token ids, a list that mixes both, or a list of such prompts.")
    ]


class LlamaExtra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that the model may look at."""

    filename: str = "tmp"
    text: str


class LlamaInfillBody(LlamaOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /infill`."""

    input_prefix: Annotated[str, Meta(description="The text before the gap.")]
    input_suffix: Annotated[str, Meta(description="The text after the gap.")]
    input_extra: Annotated[
        Annotated[list[LlamaExtra], Meta(max_length=MAX_PROMPTS)],
        Meta(description="Other files, `filename` and `text` of each."),
    ] = []
    prompt: Annotated[str, Meta(description="The beginning of the text in the gap.")] = ""


def parse(payload: dict[str, Any], kind: type[B]) -> B:
    """Check a body's form and return it as `kind`. Raises InvalidRequest."""
    body = convert(offered(payload, kind.__struct_fields__, TABLES["completion"]), kind, table=TABLES["completion"])
    for name, other in (("n_predict", "max_tokens"), ("typical_p", "typ_p"), ("n_cmpl", "n")):
        if payload.get(name) is not None and payload.get(other) is not None:
            require_equal(other, payload[other], name, payload[name])
    return body


def sampling_fields(body: LlamaOptions, payload: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the sampling parameters that the body sets, by the names of SamplingParams. Raises InvalidRequest."""
    fields = {
        PARAMETERS[name]: getattr(body, name)
        for name, value in payload.items()
        if name in PARAMETERS and value is not None and value != ""
    }
    if fields.get("max_new_tokens") == -1:
        fields["max_new_tokens"] = None
    if "temperature" in fields:
        fields["temperature"] = max(0.0, fields["temperature"])
    if fields.get("top_k") == 0:
        fields["top_k"] = -1
    if fields.get("sampling_seed") in RANDOM_SEEDS:
        del fields["sampling_seed"]
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if "logit_bias" in fields:
        fields["logit_bias"] = _biases(body, tokenizer)
    if body.n_indent:
        fields["stop_regex"] = (rf"\n[ \t]{{0,{body.n_indent - 1}}}[^ \t]",)
    if body.samplers:
        active = _samplers(body.samplers)
        for name, off in SAMPLERS.items():
            fields |= {} if name in active else off
    return fields


def names_of(payload: Mapping[str, Any]) -> planning.Names:
    """Return the names that the body uses for sampling parameters."""
    first = {parameter: name for name, parameter in reversed(PARAMETERS.items())}
    sent = {PARAMETERS[name]: name for name, value in payload.items() if name in PARAMETERS and value is not None}
    return planning.Names("", first | sent)


def _samplers(sent: str | list[str]) -> set[str]:
    """Return the names of the samplers that a body lists. Raises InvalidRequest."""
    listed = sent if isinstance(sent, str) else ["typ_p" if name == "typical_p" else name for name in sent]
    known = SAMPLER_LETTERS if isinstance(sent, str) else dict(zip(SAMPLERS, SAMPLERS, strict=True))
    for name in listed:
        if name not in known:
            raise InvalidRequest(f"samplers may have {', '.join(known)}; got {echo(name)}", field="samplers")
    names = {known[name] for name in listed}
    if "infill" in names:
        ignored.tell("samplers", "there is no infill sampler; the others act")
    return names


def _biases(body: LlamaOptions, tokenizer: Tokenizer) -> dict[int, float]:
    """Return the bias of each token id; a text's is that of each of its tokens. Raises InvalidRequest."""
    sent = body.logit_bias
    pairs: list[tuple[Any, Any]] = (
        [(key, value) for key, value in sent.items()] if isinstance(sent, dict) else [(a, b) for a, b in sent]
    )
    biases: dict[int, float] = {}
    for index, (key, value) in enumerate(pairs):
        if value is True or isinstance(value, str) or isinstance(key, bool | float):
            raise InvalidRequest(
                f"logit_bias[{index}] must be a token id or a text, and a number or false; got {echo([key, value])}",
                field="logit_bias",
            )
        if isinstance(key, str) and len(key) > MAX_BIAS_CHARS:
            raise InvalidRequest(
                f"logit_bias[{index}] has a text of {len(key)} characters; at most {MAX_BIAS_CHARS} are taken",
                field="logit_bias",
            )
        bias = LEAST_BIAS if value is False else float(value)
        is_id = isinstance(key, int) or (isinstance(sent, dict) and key.isascii() and key.isdigit())
        ids = [int(key)] if is_id else tokenizer.encode(key, add_special_tokens=False)
        biases |= dict.fromkeys(ids, bias)
    return biases


async def prompts_of(body: LlamaCompletionBody, context: Context) -> tuple[list[Prompt], list[str]]:
    """Return the prompts, and what errors call each. Raises InvalidRequest."""
    sent = body.prompt
    entries: list[Any] = sent if isinstance(sent, list) else [sent]
    is_one = (
        isinstance(sent, list)
        and any(isinstance(entry, int) for entry in entries[: MAX_PROMPTS + 1])  # more of others are no one prompt
        and not any(isinstance(entry, list | LlamaPrompt) for entry in entries)
    )
    if is_one or not isinstance(sent, list):
        return [await _prompt(sent, "prompt", context)], ["prompt"]
    if not entries:
        raise InvalidRequest(
            "prompt is an empty list; it must have at least one prompt", field="prompt", code="empty_prompt"
        )
    planning.check_batch(len(entries), "prompt", context)
    names = [f"prompt[{index}]" for index in range(len(entries))]
    return [await _prompt(entry, name, context) for entry, name in zip(entries, names, strict=True)], names


async def _prompt(sent: Any, name: str, context: Context) -> Prompt:
    """Tokenize one prompt: a text, or a list of ids and texts. Only a text at its beginning gets the BOS token."""
    if isinstance(sent, LlamaPrompt):
        if sent.multimodal_data:
            field = f"{name}.multimodal_data"
            raise InvalidRequest(f"{field}: send pictures in a chat, to /v1/chat/completions", field=field)
        sent = sent.prompt_string
    parts = sent if isinstance(sent, list) else [sent]
    if isinstance(sent, int):
        raise InvalidRequest(f"{name} is a number; send a text or a list of token ids", field=name)
    if len(parts) > MAX_PIECES and any(isinstance(part, str) for part in parts[: MAX_PIECES + 1]):
        raise InvalidRequest(
            f"{name} is a list of at most {MAX_PIECES} texts and token ids, got {len(parts)}", field=name
        )
    ids: list[int] = []
    for index, part in enumerate(parts):
        if len(ids) > context.capacity:  # whatever follows
            raise too_long(len(ids), name, context)
        if isinstance(part, int):
            ids.append(part)
        elif index == 0:
            ids += (await tokenising.tokenize([part], [name], context))[0]
        elif part:
            tokenising.check_lengths([part], [name], context)
            ids += (await tokenising.encode([part], context.tokenizer, add_special_tokens=False))[0]
    [prompt] = id_lists(ids, context, may_be_empty=False, field=name)
    return prompt
