"""Frozen values that cross the engine boundary, in process or as msgpack. Ints, strings and bytes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tureen.contract.params import SamplingParams
from tureen.grammar import GrammarSpec

LogprobsMode = Literal["processed", "raw", "both"]
HiddenStates = Literal["none", "last", "all", "pooled"]
"""The positions whose last layer's output is returned, after the final norm; pooled = one vector of the whole prompt:
their mean, or what an embedding model makes of them."""

ModelKind = Literal["generator", "embedder", "classifier"]
"""The purpose of a model, which decides the routes that answer: it writes text, makes embeddings, or scores texts and
pairs of texts."""

Pooling = Literal["mean", "cls", "last"]
"""How an embedding model makes one vector of the tokens' vectors: their mean, the first token's, or the last's."""

RopeFactors = Literal["short", "long"]
"""The list of factors of LongRoPE that a server uses."""

PauseMode = Literal["abort", "retract", "in_place"]

EngineRole = Literal["prefill", "decode", "both"]
"""The work of one engine of several: it computes long prompts, whose pages others read; it answers; or both."""

ScoreActivation = Literal["identity", "sigmoid", "softmax"]
"""The function that turns a classifier's logits into the numbers of an answer."""

NO_TOKEN = -1
"""Stands in a prompt's token ids in place of a token that the client gave as an embedding."""

PICTURE, VIDEO = NO_TOKEN - 1, NO_TOKEN - 2
"""Stand in a prompt's token ids for its placeholders, until what they stand for is there."""

LEAST_LOGPROB = -9999.0
"""Log-probability of a token that cannot come, in place of -infinity, which JSON does not have. OpenAI's API and vLLM
use the same number."""

TokenLogprob = tuple[float | None, int]
"""A log-probability in nats, and the token's id; None for the first token of a prompt, which nothing predicts."""


class LogprobSpec(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities that a request asked for."""

    prompt_start: int = -1  # first prompt position reported; -1 = output only
    top: int = 0  # number of best alternatives per position
    token_ids: tuple[int, ...] = ()  # these ids at every position
    mode: LogprobsMode = "processed"
    entropy_start: int = -1  # first position of a token with the entropy of its distribution; -1 = none
    support: bool = False  # of drawn tokens: those that could be drawn, after the cuts


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """A picture or a video in a prompt, as the model's encoder takes it; or one of the parts that text divides it into.
    The first part has the pixels."""

    digest: str  # hex; equal where pixels and layout are: encoded once, and part of the prefix cache's key
    start: int  # position in the prompt of the first of its tokens
    num_tokens: int
    pixels: bytes  # uint8 [tiles, height, width, 3]: resized and cropped, not normalised
    shape: tuple[int, int, int, int]
    layout: tuple[int, ...] = ()  # what more the encoder must know; see media/base.py
    rows_before: int = 0  # of the picture's embeddings, those that belong to earlier items, with text between
    rows_after: int = 0  # and to later ones
    grid: tuple[int, ...] = ()  # rows and columns of its tokens, for models whose vectors turn with them
    is_whole: bool = False  # layers see all of it at once, so that one step computes all its tokens

    @property
    def num_rows(self) -> int:
        """The number of embeddings that the picture becomes."""
        return self.rows_before + self.num_tokens + self.rows_after


class BannedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Sequences of tokens that the output may not have, each of at least one token."""

    field: str  # the client's name for them
    sequences: tuple[tuple[int, ...], ...]

    def forbid(self, output_ids: Sequence[int], token_id: int) -> bool:
        """Says whether the token would complete one of them."""
        return any(
            sequence[-1] == token_id and tuple(output_ids[len(output_ids) - len(sequence) + 1 :]) == sequence[:-1]
            for sequence in self.sequences
            if len(sequence) <= len(output_ids) + 1
        )


class LaterGrammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on an answer that another request will write, after the thoughts that this one writes."""

    spec: GrammarSpec
    room: int  # tokens that the thoughts and the answer may have together
    field: str  # what the client called the limit that leaves them no more ...
    limits: str  # ... and that limit with its number, in words


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request: one prompt, one sample. Already validated against vocabulary and context."""

    id: str  # internal id, unique for the life of the engine
    token_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int  # resolved: never null, prompt + max_new_tokens <= capacity
    seed: int  # resolved: sampling_seed + sample index
    logprobs: LogprobSpec | None = None
    cache_salt: str = ""  # separates the prefix cache
    client: str = ""  # who asks: clients that wait at the same time get shares of the engine ...
    client_weight: float = 1.0  # ... in proportion to these
    adapter: str = ""  # name or path of one that is loaded
    embeds: bytes = b""  # prompt embeddings, float32 [num_prompt, hidden_size]; token_ids are then all NO_TOKEN
    second_start: int = 0  # of a pair of texts: the first position that is of the second token type; 0 = no pair
    media: tuple[MediaItem, ...] = ()  # where they stand, token_ids has a number below NO_TOKEN made of their digest
    hidden_states: HiddenStates = "none"
    explain: bool = False
    timed: bool = False  # its last delta has a Timeline
    reports_progress: bool = False  # deltas without tokens say how much of a long prompt is computed
    processor: str = ""  # custom logit processor: a registered name, or a client's payload (a JSON object)
    banned: BannedTokens | None = None
    grammar: GrammarSpec | None = None  # what the whole output must match
    grammar_field: str = ""  # what the client called it
    later: LaterGrammar | None = None  # without `grammar`: it is compiled, and gets the room that it needs
    limit_field: str = ""  # what the client called max_new_tokens; "" = it sent none: a grammar may need more
    priority: int = 0
    when_idle: bool = False  # runs only in steps in which no request without this mark can run
    deadline_ms: int | None = None  # wall clock from arrival
    ttft_deadline_ms: int | None = None
    awaits_saving: bool = False  # it ends when its full pages are kept outside the KV cache, for other engines
    resumed: tuple[int, ...] = ()
    """Output tokens that another engine made and the client has already. The output continues after them.

    None of them is sent again; all of them count in `usage`. They end where a delta ended, which tells the text that
    was sent with them: all but unfinished characters, possible stops, and what waited for log-probabilities. Never set
    by a client.
    """
    resumed_cached: int = 0  # cached tokens of the prompt as the client's usage has them
    resumed_states: int = 0  # hidden states that the client has already

    @property
    def cache_space(self) -> tuple[str, str]:
        """Tells apart requests that have no cached prefixes in common, whatever their tokens are."""
        return self.cache_salt, self.adapter


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a request ended. `error` carries the HTTP status that its client should see."""

    type: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None  # stop: the token id, the stop string, or the text that a stop_regex matched
    pattern: str = ""  # stop: the stop_regex that matched
    length: int | None = None  # length: number of output tokens
    message: str | None = None  # abort, error
    reason: str | None = None  # abort: "deadline", "client", …; stop: "repetition", of an output that repeats itself
    status: int | None = None  # error: HTTP status
    code: str | None = None  # error: machine-readable code
    field: str | None = None  # error: the request's field at fault
    retry_after_s: int | None = None
    closed_early: bool = False  # stop: the output was brought to its end because its limit was near

    @property
    def openai_name(self) -> str:
        """The reason as OpenAI's routes name it, and vLLM's where OpenAI has none."""
        return "repetition" if self.type == "stop" and self.reason == "repetition" else self.type


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """The token counts of one request, as its client's `usage` has them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    forced_tokens: int = 0  # of the output tokens, those that the grammar left no choice about: they were not drawn
    loaded_tokens: int = 0  # of the cached tokens, those that were loaded from outside the KV cache for this request
    preemptions: int = 0
    guessed_tokens: int = 0  # tokens that were guessed before they were drawn ...
    right_guesses: int = 0  # ... and, of those, the ones that were drawn
    computed_tokens: int = 0  # of the prompt; only before the first drawn token, if the request asks for progress


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token there, the best alternatives, the asked ids in asked order."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] | None = None
    token_ids: tuple[TokenLogprob, ...] | None = None
    raw: PositionLogprobs | None = None  # the model's own, of an output token that was drawn, with mode "both"
    entropy: float | None = None  # of the distribution, in nats, if it was asked for
    support: tuple[int, ...] | None = None  # tokens that the cuts kept, if asked for and there were cuts; by id
    share: float | None = None  # with them: the log-probability of the token among them


class StageView(msgspec.Struct, frozen=True, array_like=True):
    """A stage of the sampling pipeline as it acted on a token's candidates; the numbers are in their order."""

    name: str  # of the sampling parameter, where it is one
    probabilities: tuple[float, ...]  # after the stage; 0 = removed
    value: int | float | None = None  # of the parameter, where it is a number
    logits: tuple[float | None, ...] = ()  # after a stage that changes logits; None = -infinity
    num_kept: int | None = None  # a cut: how many tokens are left of the whole vocabulary
    starts: tuple[float | None, ...] = ()  # of the draw: where the candidate's share of [0, 1) begins; None = no share
    ends: tuple[float | None, ...] = ()  # of the draw: where it ends, which is outside


class Explanation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The reason why an output token was chosen."""

    token_id: int
    position: int  # index in prompt and output; the random number is that of the seed and this
    chosen_by: Literal["draw", "best", "grammar", "budget"]
    """The reason: a random number; the largest logit (temperature 0); the grammar, which left no choice; the limit of
    the reasoning, whose end was appended."""

    guessed: bool = False  # speculation had guessed it, and it was drawn
    random: float | None = None
    candidates: tuple[int, ...] = ()  # token ids: the best after each stage, and the token itself
    stages: tuple[StageView, ...] = ()  # in the order applied


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """A step that computed tokens of a request."""

    began_ns: int
    ended_ns: int
    num_tokens: int


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """The times at which the engine did something for a request, in nanoseconds since 1970; 0 = it never did."""

    received_ns: int
    compiled_ns: int  # its grammar
    drawn_ns: int  # its first token
    ended_ns: int
    num_steps: int
    steps: tuple[StepTimes, ...]  # the first of them
    prompt: Timeline | None = None  # of the engine that computed the prompt for this one, if any did


class OutputDelta(msgspec.Struct, frozen=True, array_like=True):
    """A piece of one request's output. `text` never ends inside a character or a possible stop string.

    Exactly one delta of a request has `finish`; it is the last.
    """

    id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    usage: Usage | None = None
    output_logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # from prompt_start on; sent once, with the first delta
    finish: FinishReason | None = None
    hidden_states: tuple[bytes, ...] = ()  # float32 [hidden_size] per position, in order of positions, each sent once
    unenforced: tuple[str, ...] = ()  # of what its constraint says, with the last delta: "uniqueItems at /tags"
    explanations: tuple[Explanation, ...] = ()  # of each of token_ids, if the request asks for them
    timeline: Timeline | None = None  # with the last delta, if the request is timed


class KvDiskStats(msgspec.Struct, frozen=True, array_like=True):
    """The KV pages and states on the disk: bytes there, and how many went to and fro since the start. Totals only
    grow."""

    num_bytes: int = 0  # of all pages in the folder, other processes' too
    total_saved: int = 0
    total_loaded: int = 0
    total_evicted: int = 0  # removed to keep the quota
    total_lost: int = 0  # left the KV cache before they were saved
    total_damaged: int = 0  # were not as they had been written, and were computed again
    total_failed: int = 0  # attempts to read or write that the disk refused


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's gauges and running totals after a step. Totals only grow."""

    num_running: int = 0
    num_queued: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0  # evictable: only the prefix cache holds them
    num_pages: int = 0
    total_prompt_tokens: int = 0  # prompt tokens of admitted requests
    total_cached_tokens: int = 0  # of those, found in the prefix cache
    total_output_tokens: int = 0
    total_preemptions: int = 0
    total_steps: int = 0
    step_ms: float = 0.0  # the last step, schedule to commit
    is_paused: bool = False
    num_preparing: int = 0  # requests whose grammar is being compiled
    total_forced_tokens: int = 0
    total_grammar_compiles: int = 0
    total_grammar_hits: int = 0  # found compiled, or being compiled
    total_grammar_failures: int = 0  # refused, time-outs included
    total_grammar_timeouts: int = 0
    total_grammar_ms: float = 0.0  # from the request for a compilation to its end
    total_pictures: int = 0  # in prompts, as far as there are embeddings for them
    total_pictures_encoded: int = 0
    seconds_per_end: float = 1.0  # expected until the next request ends, at least 1
    helpers_down: tuple[str, ...] = ()  # helper processes that are being replaced, in words
    kv_disk: KvDiskStats | None = None  # where there is a --kv-disk
    num_used_window_pages: int = 0  # held by running requests
    num_window_pages: int = 0  # of layers with a window; 0: all layers share one pool
    total_guessed_tokens: int = 0
    total_right_guesses: int = 0
    total_saved_s: float = 0.0  # by right guesses, without what guesses cost; estimated from times of steps

    @property
    def num_used_pages(self) -> int:
        """The pages that running requests hold."""
        return self.num_pages - self.num_free_pages - self.num_cached_pages


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine, as the front sees it.

    `suspect`: it does not answer, and may come back; `replacing`: another one is being started. Requests wait meanwhile
    and go on. `down`: requests are refused for an unknown time. `unloaded`: it was ended to make room for
    other models, and is started again for the next request.
    """

    state: Literal["healthy", "suspect", "replacing", "down", "unloaded"] = "healthy"
    reason: str = ""
    retry_after_s: int = 1  # when it is likely to be healthy
    num_replacements: int = 0
    num_resumed: int = 0  # requests that went on in another engine
    num_poison: int = 0  # requests that were ended because engines died of them


class Classifier(msgspec.Struct, frozen=True):
    """The labels of a model that scores texts, and how its logits become scores. A cross-encoder has one label."""

    labels: tuple[str, ...]
    pair_activation: ScoreActivation = "sigmoid"  # of the score of a pair
    label_activation: ScoreActivation = "softmax"  # of the probabilities of labels


class Judge(msgspec.Struct, frozen=True):
    """How a model judges if a document suits a query: the token ids of its answers, and the text around the two."""

    yes: int
    no: int
    before: str
    after: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the engine that the front needs, known once it is ready."""

    model_path: str
    model_name: str
    architecture: str
    model_type: str
    device: str
    dtype: str
    activations: str = ""  # inputs of matrices in block formats; "" = there are no such matrices
    processor: str = ""  # instruction set of the kernels, or name of the GPU; "" = unknown
    vocab_size: int
    context_len: int  # tokens, prompt + output
    max_total_tokens: int  # KV cache size in tokens
    page_size: int
    hidden_size: int
    kv_bytes_per_token: int
    max_running_requests: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    load_seconds: float = 0.0
    adapters: dict[str, str] = {}  # loaded at the start: name -> path
    generation_defaults: dict[str, int | float] = {}
    """Sampling parameters that the model's makers recommend. An int stays an int: msgspec makes 20 of a `float` 20.0,
    which is no top_k."""

    pooling: Pooling | None = None  # the model makes embeddings in this way and generates nothing
    prompts: dict[str, str] = {}  # texts before those that are embedded, by the names that the model's files give them
    default_prompt: str | None = None  # the name of the prompt of a text for which the client names none
    similarity: Literal["cosine", "dot"] = "cosine"  # of two embeddings
    classifier: Classifier | None = None  # the model scores texts and generates nothing
    judge: Judge | None = None  # of a model that generates: it was trained to judge documents
    rope_factors: RopeFactors | None = None  # None: the model has no LongRoPE
    embedding_sizes: tuple[int, ...] = ()  # to which an embedding may be cut
    files: tuple[tuple[str, int, int], ...] = ()  # that the weights came from: name, bytes, time of the last change
    weights: str = ""  # digest of their files, where durable sessions are kept
    num_parameters: int = 0  # of the model's files; 0 = unknown
    quantization: str = ""  # of the model's files, as they name it; "" = unknown
    kv_identity: str = ""  # digest of all that KV pages depend on, where they are kept on a disk
    kv_folder: str = ""  # tells the folder in which they are kept from others

    @property
    def kind(self) -> ModelKind:
        """The purpose of the model."""
        if self.classifier is not None:
            return "classifier"
        return "generator" if self.pooling is None else "embedder"


# What the front sends to the engine's loop ...


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Gives the engine a request."""

    request: GenerateRequest
    arrived_s: float | None = (
        None  # this machine's monotonic clock when the client asked; None = when the loop takes it
    )


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Ends a request early."""

    request_id: str
    reason: str = "client"


class ControlCall(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """Runs the engine's method `op` with these arguments. The CallResult with the same number answers it."""

    number: int
    op: str
    args: dict[str, Any] = {}


class Close(msgspec.Struct, frozen=True, tag="close", array_like=True):
    """Stops the loop after the current step; unfinished requests end with an abort."""


ToEngine = Submit | Abort | ControlCall | Close

# ... and what comes back.


class StepReport(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """The deltas of a step, and the engine's figures after it."""

    deltas: tuple[OutputDelta, ...]
    stats: EngineStats = EngineStats()


class CallResult(msgspec.Struct, frozen=True, tag="result", array_like=True):
    """The answer to a ControlCall: its value, or its error."""

    number: int
    value: Any = None
    error: FinishReason | None = None  # type "error"


class EngineReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The engine is built and takes requests."""

    info: EngineInfo


class StartupPhase(msgspec.Struct, frozen=True, tag="phase", array_like=True):
    """Reports progress of start-up; `total` 0 = unknown."""

    name: str
    done: int
    total: int


class EngineFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The engine ends. `message` is one line for the operator; `startup` says whether it failed before it was ever
    ready."""

    message: str
    startup: bool = False


FromEngine = StepReport | CallResult | StartupPhase | EngineReady | EngineFailed
