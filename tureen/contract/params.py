"""Every sampling parameter, once: type, bounds, default, meaning. HTTP, wire, CLI and docs derive from this table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tureen.config import MAX_N, MAX_PROMPTS, MAX_STOPS
from tureen.errors import InvalidRequest, echo
from tureen.grammar.base import SCHEMAS, max_bytes

MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 1 << 15  # of all together; bounds what is tokenized and looked for
MAX_PATTERN_LEN = 50_000  # characters of all stop_regex patterns with their {counts} written out; bounds compiling
MAX_BIAS = 100
MAX_CUSTOM_PARAMS_BYTES = 16 << 10
MAX_KEYS = 4096  # of an object whose fields are a client's own
MAX_CHOICES = 1 << 16  # what MAX_GRAMMAR_BYTES hold, at 4 bytes each
MAX_MARKER_CHARS = 256
MAX_PATTERN_TOKENS = 1024  # of repetition_detection
MAX_REPETITION_WORK = 10 * MAX_PATTERN_TOKENS  # sizes of patterns, times their count
CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "choice", "dtype")
EMPTY_IS_UNSET = ("json_schema", "regex", "ebnf", "structural_tag")
"""The constraints of which an empty string says nothing, as SGLang has it."""
VLLM_CONSTRAINTS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""The names that vLLM has for the constraints."""

COUNTS, NUMBERS = re.compile(r"\{([^{}]*)\}"), re.compile("[0-9]+")
VERBOSE_FLAG = re.compile(r"\(\?[A-Za-z0-9-]*x")  # it would let spaces and comments hide in a count
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

JsonObject = Annotated[dict[str, Any], Meta(max_length=MAX_KEYS)]
Stops = Annotated[list[str], Meta(max_length=MAX_STOPS)]
AllowedTokenIds = Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]
StopTokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
RepetitionDetection = Annotated[
    dict[
        Literal["max_pattern_size", "min_pattern_size", "min_count"], Annotated[int, Meta(ge=0, le=MAX_PATTERN_TOKENS)]
    ],
    Meta(max_length=3),
]
LogitBias = Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)]

GROUP = "x-group"
"""The name in /openapi.json of the group to which a parameter belongs."""
LENGTH = {GROUP: "Length and end"}
SAMPLING = {GROUP: "Sampling"}
PENALTIES = {GROUP: "Penalties"}
CONSTRAINING = {GROUP: "Constraint"}
WORDS = {GROUP: "Tokens and words"}
FORM = {GROUP: "Form"}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sampling parameters of one request: how its tokens are drawn and when it ends.

    msgspec checks types and bounds where it decodes or converts them; `check_params` checks the rest.
    """

    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT64_MAX)] | None,
        Meta(
            description="Most tokens to generate; null = up to the context end, 0 = compute the prompt only. "
            "A value given explicitly must fit the context together with the prompt.",
            extra_json_schema=LENGTH,
        ),
    ] = 128
    min_new_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=INT64_MAX,
            description="Until reached, EOS and stop token ids cannot be sampled and stop strings do not end "
            "the output. At most max_new_tokens.",
            extra_json_schema=LENGTH,
        ),
    ] = 0
    stop: Annotated[
        tuple[str, ...],
        Meta(
            max_length=MAX_STOPS,
            description="Strings that end the output; the earliest match wins. At most --max-stop-strings, of 1..1024 "
            "characters.",
            extra_json_schema=LENGTH,
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...],
        Meta(
            max_length=MAX_STOP_TOKEN_IDS,
            description="Token ids that end the output. At most 1024.",
            extra_json_schema=LENGTH,
        ),
    ] = ()
    stop_regex: Annotated[
        tuple[str, ...],
        Meta(
            max_length=MAX_STOPS,
            description="Patterns that end the output, trimmed and held back as `stop` is, in the syntax of Python's "
            "regex package, whose \\w and \\b count combining marks as letters. At most --max-stop-strings, of 1..1024 "
            "characters.",
            extra_json_schema=LENGTH,
        ),
    ] = ()
    temperature: Annotated[
        float, Meta(ge=0, description="0 = greedy; higher = more varied.", extra_json_schema=SAMPLING)
    ] = 1.0
    top_p: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Keep the smallest set of tokens whose probability reaches top_p.",
            extra_json_schema=SAMPLING,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Meta(
            ge=-1,
            le=INT64_MAX,
            description="Keep the k most probable tokens; -1 and 0 = all.",
            extra_json_schema=SAMPLING,
        ),
    ] = -1
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="Keep tokens with p >= min_p * p_max.", extra_json_schema=SAMPLING)
    ] = 0.0
    typical_p: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Of the tokens that the other filters keep, keep the fewest that reach this probability, "
            "nearest to the expected one (locally typical sampling).",
            extra_json_schema=SAMPLING,
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Meta(
            ge=-2, le=2, description="logit -= penalty * count of the token in the output.", extra_json_schema=PENALTIES
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Meta(ge=-2, le=2, description="logit -= penalty if the token is in the output.", extra_json_schema=PENALTIES),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Meta(
            ge=0,
            le=2,
            description="Tokens in prompt or output: a positive logit is divided by it, a negative one multiplied. "
            "1.0 and 0.0 mean off.",
            extra_json_schema=PENALTIES,
        ),
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        Meta(
            ge=-1,
            le=INT64_MAX,
            description="The three penalties look at this many of the last tokens; -1 = all, 0 = the penalties are "
            "off.",
            extra_json_schema=PENALTIES,
        ),
    ] = -1
    ignore_eos: Annotated[
        bool,
        Meta(
            description="EOS does not end the output; stop strings and stop token ids still do.",
            extra_json_schema=LENGTH,
        ),
    ] = False
    skip_special_tokens: Annotated[
        bool, Meta(description="Leave special tokens out of the text.", extra_json_schema=FORM)
    ] = True
    spaces_between_special_tokens: Annotated[
        bool,
        Meta(
            description="false = no space between two adjacent special tokens, whatever the tokenizer's decoder adds.",
            extra_json_schema=FORM,
        ),
    ] = True
    no_stop_trim: Annotated[
        bool, Meta(description="Keep the stop string or stop token in the text.", extra_json_schema=LENGTH)
    ] = False
    n: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_N,
            description="Samples per prompt, up to --max-n; sample i has sampling_seed + i.",
            extra_json_schema=SAMPLING,
        ),
    ] = 1
    json_schema: Annotated[
        str | JsonObject | None,
        Meta(
            description="The output is JSON that is valid against this schema, an object or its text.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = None
    regex: Annotated[
        str | None,
        Meta(
            description="The output matches this pattern as Python's re.fullmatch does with the flag a.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = None
    ebnf: Annotated[
        str | None,
        Meta(
            description="The output matches this grammar: GBNF, from its `root`, or Lark, from `start`.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = None
    structural_tag: Annotated[
        str | JsonObject | None,
        Meta(
            description="Free text with constrained parts, an object or its text; see the structured outputs page.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = None
    choice: Annotated[
        Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_CHOICES)] | None,
        Meta(description="The output is one of these strings.", extra_json_schema=CONSTRAINING),
    ] = None
    dtype: Annotated[
        Literal["int", "float", "bool", "str"] | None,
        Meta(
            description="The output is a literal of this Python type; int and float also end at a space or newline.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = None
    strict_schema: Annotated[
        bool,
        Meta(
            description="Refuse a JSON schema that cannot be enforced fully. Otherwise the rest is enforced, and the "
            "answer says what is not.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = False
    grammar_after: Annotated[
        str,
        Meta(
            max_length=MAX_MARKER_CHARS,
            description="Free text, such as reasoning, comes first; the constraint holds from this marker on.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = ""
    close_early: Annotated[
        bool,
        Meta(
            description="A constrained output is complete within max_new_tokens: near the limit, only tokens that can "
            "still be completed are sampled; free text around tags is cut. false = the limit cuts everything.",
            extra_json_schema=CONSTRAINING,
        ),
    ] = True
    logit_bias: Annotated[
        LogitBias,
        Meta(description="Added to the logits of these token ids; each in [-100, 100].", extra_json_schema=WORDS),
    ] = msgspec.field(default_factory=dict)
    allowed_token_ids: Annotated[
        AllowedTokenIds | None,
        Meta(
            description="Only these tokens are sampled; the output ends by itself only if they include an EOS.",
            extra_json_schema=WORDS,
        ),
    ] = None
    bad_words: Annotated[
        tuple[str, ...],
        Meta(
            max_length=MAX_BAD_WORDS,
            description="Forbidden words. The last token of each, written with and without a space before it, is not "
            "drawn after the others. At most 1024, of 32768 characters together.",
            extra_json_schema=WORDS,
        ),
    ] = ()
    repetition_detection: Annotated[
        RepetitionDetection | None,
        Meta(
            description="End the output when its last tokens repeat a pattern of min_pattern_size (1) to "
            "max_pattern_size tokens, min_count times in a row.",
            extra_json_schema=LENGTH,
        ),
    ] = None
    custom_params: Annotated[
        JsonObject | Annotated[tuple[JsonObject | None, ...], Meta(max_length=MAX_PROMPTS)] | None,
        Meta(
            description="Passed to the custom logit processor as this request's entry of custom_param_list. A list has "
            "one for each prompt of a batch, or for each output.",
            extra_json_schema=FORM,
        ),
    ] = None
    sampling_seed: Annotated[
        Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None,
        Meta(
            description="Same request, same seed, same tokens. Default: random, reported.", extra_json_schema=SAMPLING
        ),
    ] = msgspec.field(default=None)
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=INT64_MAX)] | None,
        Meta(description="Tokens per stream event. Default: the server's --stream-interval.", extra_json_schema=FORM),
    ] = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def processor_params(self) -> dict[str, Any]:
        """The custom_params of one request, in which a list has become the entry of its output."""
        return self.custom_params if isinstance(self.custom_params, dict) else {}

    @property
    def has_output_penalty(self) -> bool:
        """Whether a penalty looks at the output alone."""
        return self.repeat_last_n != 0 and (self.frequency_penalty != 0.0 or self.presence_penalty != 0.0)

    @property
    def has_repetition_penalty(self) -> bool:
        return self.repeat_last_n != 0 and self.repetition_penalty not in (0.0, 1.0)


DRAWING = ("temperature", "top_k", "top_p", "min_p")
"""The parameters of the distribution that finished answers of SGLang's API have."""
ALIASES = {"seed": "sampling_seed"}
FLOAT_FIELDS = tuple(f.name for f in msgspec.structs.fields(SamplingParams) if isinstance(f.default, float))


def check_params(params: SamplingParams, *, vocab_size: int, path: Callable[[str], str] = str) -> None:
    """Checks the rules that types and single bounds cannot say.

    path: returns the name that the client has for a field. Raises InvalidRequest naming the field.
    """
    for name, message in _faults(params, vocab_size):
        raise InvalidRequest(f"{path(name)} {message}", field=path(name))


def _faults(params: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yields each broken rule as (field, message)."""
    for name in FLOAT_FIELDS:
        if not math.isfinite(getattr(params, name)):
            yield name, f"must be a finite number, got {getattr(params, name)}"
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        most = params.max_new_tokens
        yield "min_new_tokens", f"must be at most max_new_tokens ({most}), got {params.min_new_tokens}"
    yield from _stop_faults("stop", params.stop)
    yield from _stop_faults("stop_regex", params.stop_regex)
    yield from _pattern_faults(params.stop_regex)
    yield from _token_faults(params, vocab_size)
    yield from _bad_word_faults(params)
    yield from _repetition_faults(params)
    yield from _constraint_faults(params)
    for entry in params.custom_params if isinstance(params.custom_params, tuple) else [params.custom_params]:
        if entry is not None and len(msgspec.json.encode(entry)) > MAX_CUSTOM_PARAMS_BYTES:
            yield "custom_params", f"must be at most {MAX_CUSTOM_PARAMS_BYTES} bytes of JSON"
        elif not _fits_msgpack(entry):
            yield "custom_params", "has an integer of more than 64 bits; send it as a string"


def _fits_msgpack(value: JsonObject | None) -> bool:
    """Return whether a JSON value can be sent to an engine in another process."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


def _stop_faults(name: str, stops: Sequence[str]) -> Iterator[tuple[str, str]]:
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            yield name, f"entries must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}"


def _bad_word_faults(params: SamplingParams) -> Iterator[tuple[str, str]]:
    if not all(word.strip() for word in params.bad_words):
        yield "bad_words", "has an entry without a visible character; leave it out"
    num_chars = sum(map(len, params.bad_words))
    if num_chars > MAX_BAD_WORD_CHARS:
        yield "bad_words", f"may have {MAX_BAD_WORD_CHARS} characters in all its entries, got {num_chars}"


def repetition_bounds(params: SamplingParams) -> tuple[int, int, int] | None:
    """Returns the shortest and the longest pattern, and the count, of repetition_detection; None = it is off."""
    sent = params.repetition_detection or {}
    longest = sent.get("max_pattern_size", 0)
    return (max(1, sent.get("min_pattern_size", 0)), longest, sent.get("min_count", 0)) if longest else None


def _repetition_faults(params: SamplingParams) -> Iterator[tuple[str, str]]:
    name, bounds = "repetition_detection", repetition_bounds(params)
    if bounds is None:
        if params.repetition_detection and params.repetition_detection.get("min_pattern_size"):
            yield name, "needs max_pattern_size, which is at least min_pattern_size; 0 = off"
        return
    shortest, longest, count = bounds
    if shortest > longest:
        yield name, f"has min_pattern_size {shortest}, more than max_pattern_size {longest}"
    if count < 2:
        yield name, f"needs a min_count of at least 2, got {count}; leave it out to detect nothing"
    work = (longest - shortest + 1) * count
    if work > MAX_REPETITION_WORK:
        yield (
            name,
            f"looks for {longest - shortest + 1} sizes times {count}, {work} in all; at most {MAX_REPETITION_WORK}: "
            "lower max_pattern_size or min_count",
        )


def _pattern_faults(patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    if not patterns:
        return
    import regex  # noqa: PLC0415 - when it is first needed: start-up does without

    for pattern in patterns:
        if VERBOSE_FLAG.search(pattern):
            yield "stop_regex", f"{echo(pattern)} uses the flag x, which is not supported"
    if sum(map(_written_out_len, patterns)) > MAX_PATTERN_LEN:
        longest = echo(max(patterns, key=_written_out_len))
        yield (
            "stop_regex",
            f"{longest} repeats too much: written out, all patterns may have {MAX_PATTERN_LEN} characters",
        )
    for pattern in patterns:
        try:
            compiled = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            yield "stop_regex", f"{echo(pattern)} is not a valid pattern: {echo(str(error))}"
        else:
            if compiled.flags & regex.REVERSE:
                yield "stop_regex", f"{echo(pattern)} searches backwards (flag r), which is not supported"
            elif compiled.match("") is not None:
                yield "stop_regex", f"{echo(pattern)} matches the empty string; it would end every output immediately"


def _constraint_faults(params: SamplingParams) -> Iterator[tuple[str, str]]:
    constraints = [name for name in CONSTRAINTS if getattr(params, name) is not None]
    if len(constraints) > 1:
        yield constraints[1], f"cannot go with {constraints[0]}: at most one of {', '.join(CONSTRAINTS)}"
    if constraints and params.allowed_token_ids is not None:
        yield "allowed_token_ids", "cannot go with a constraint; let the constraint say which texts are allowed"
    if params.grammar_after and not constraints:
        yield "grammar_after", f"needs a constraint for the text after it: one of {', '.join(CONSTRAINTS)}"
    if params.strict_schema and not SCHEMAS.intersection(constraints):
        yield "strict_schema", f"needs a schema: one of {', '.join(sorted(SCHEMAS))}"
    for name in constraints:
        value = getattr(params, name)
        if value == "":
            yield name, "is empty; leave it out, or send what the output must match"
        size = len(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else msgspec.json.encode(value))
        if size > max_bytes(name):
            yield name, f"has {size} bytes; at most {max_bytes(name)}; make it smaller"


def _written_out_len(pattern: str) -> int:
    """Returns at least the pattern's length with every {count} written out, which is what compiling it costs."""
    length = len(pattern)
    for inside in COUNTS.findall(pattern):
        length *= max((int(number) for number in NUMBERS.findall(inside)), default=1) or 1
    return length


def _token_faults(params: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield "stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(params.stop_token_ids)}"
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            yield "stop_token_ids", f"must be token ids in [0, {vocab_size}), got {echo(token_id)}"
    for token_id in params.allowed_token_ids or ():
        if not 0 <= token_id < vocab_size:
            yield "allowed_token_ids", f"must be token ids in [0, {vocab_size}), got {echo(token_id)}"
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            yield "logit_bias", f"must have token ids in [0, {vocab_size}) as keys, got {echo(token_id)}"
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            yield "logit_bias", f"values must be in [-{MAX_BIAS}, {MAX_BIAS}], got {echo(bias)} for {token_id}"


def without_history(params: SamplingParams) -> SamplingParams:
    """Returns those parameters of a token's distribution that do not depend on the text before it."""
    return SamplingParams(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p)
