"""Composition root: makes tokenizer, engine and client from a Config. Only this file knows which concrete classes are
in use.

Imports: attention, config, config_facts, contract, devices, engine, errors, extras, fetching, grammar, grammar_service,
kernels, kv_offload, log, media, registry, runner, sandbox, serving, text, weights; msgspec.
Imported by: api_workers, bench, data_parallel, multi_model, offline, server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tureen.attention.choice import AUTO, NATIVE
from tureen.config import Config, cache_dir
from tureen.config_facts import adapter_of, has_ranks
from tureen.contract.types import EngineInfo
from tureen.devices.base import may_have_cuda
from tureen.devices.threads import wait_politely
from tureen.engine.embedding import EmbeddingEngine
from tureen.engine.engine import Engine
from tureen.engine.guessing import Guesser
from tureen.engine.loop import SteppedEngine
from tureen.engine.queue import Schedule
from tureen.engine.scheduler import Drafters
from tureen.errors import StartupError, TureenError
from tureen.extras import is_installed, require
from tureen.fetching.pull import pull
from tureen.grammar import Vocabulary
from tureen.grammar_service.availability import why_unconstrained
from tureen.grammar_service.compiler import Compiler
from tureen.grammar_service.kept_grammars import KeptGrammars
from tureen.kernels.cpu import native
from tureen.log import Progress, get_logger, no_progress
from tureen.media.families import sees
from tureen.media.files import media_root
from tureen.media.loader import MediaLoader
from tureen.registry import declared, declaring, unsupported
from tureen.runner.kinds import ENCODERS, is_encoder, judge_of, model_kind
from tureen.runner.kv_pool import NO_DRAFT
from tureen.runner.load import load_runner
from tureen.runner.loading import architecture_of
from tureen.runner.parts import files_of
from tureen.sandbox.budget import FRONT_SHARE, MemoryBudget, helper_bytes
from tureen.serving.inproc import InprocClient
from tureen.serving.process import ProcessClient
from tureen.text.chat_template import check_chat_template
from tureen.text.tokenizer import Tokenizer
from tureen.text.tools import marks_calls
from tureen.weights.facts import file_facts
from tureen.weights.sentence_files import classifier_of, embedding_sizes
from tureen.weights.source import (
    ModelSource,
    generation_defaults,
    load_tokenizer,
    model_config,
    open_model,
    preprocessor_config,
    weights_digest,
)

if TYPE_CHECKING:
    from tureen.contract.runner import Runner
    from tureen.runner.draft import DraftOnDisk
    from tureen.runner.model_runner import ModelRunner
    from tureen.runner.shared_weights import SharedWeights


log = get_logger("build")

NOTHING_COMPUTES = (
    "nothing here can compute: this installation has neither native CPU kernels nor torch. Install a wheel of tureen "
    "that has them (pip install --force-reinstall --no-deps tureen); or a C++17 compiler and Python's headers (Debian: "
    "apt-get install g++ python3-dev), then tureen again; or torch: pip install 'tureen[torch]'"
)
"""The error of an installation without anything that computes."""


class Reason(NamedTuple):
    """The setting, or the kind of model, for which torch is needed."""

    what: str
    field: str
    modules: tuple[str, ...] = ("torch",)


class Model(NamedTuple):
    """A model found on disk, with all that the front needs of it."""

    source: ModelSource
    tokenizer: Tokenizer


def find_model(config: Config, *, progress: Progress = no_progress) -> Model:
    """Fetches the model if it is not on disk and makes its tokenizer. Imports no torch. Raises StartupError."""
    source = open_model(fetch_model(config, progress=progress), config)
    _require_architecture(source, config)
    progress("build tokenizer", 0, 1)
    tokenizer = load_tokenizer(source, config.tokenizer_path)
    progress("build tokenizer", 1, 1)
    model = Model(source, tokenizer)
    _require_torch(_models_with_torch(config, model))
    return model


def fetch_model(config: Config, *, progress: Progress = no_progress) -> Path:
    """Checks the settings, then fetches the model if it is not on disk. Returns its folder or file. Raises
    StartupError."""
    if config.models:
        raise StartupError(
            f"models: {len(config.models)} models are named, but only one can be loaded here; name one with model_path "
            "(--model), or serve them all with: tureen serve",
            field="models",
        )
    check_chat_template(config.chat_template)
    _require_torch(_settings_with_torch(config))
    return pull(config.model_path, config, progress)


def _require_architecture(source: ModelSource, config: Config) -> None:
    """Raises StartupError for an architecture that is not served, before anything else of the model is judged."""
    hf = model_config(source)
    architecture = architecture_of(hf)
    is_served = is_encoder(hf) or declaring("tureen.models", "ARCHITECTURES", architecture) is not None
    if not is_served and config.model_impl != "transformers":
        raise unsupported(architecture)


def media_loader(config: Config, model: Model) -> MediaLoader | None:
    """Makes the loader of pictures for a model that takes some here; None for others. Raises StartupError."""
    hf = model_config(model.source)
    if not sees(hf, config):
        return None
    return MediaLoader(
        hf,
        preprocessor_config(model.source),
        media_path=media_root(config.media_path, config.host),
        allowed_domains=config.allowed_media_domain,
        max_pixels=config.max_picture_pixels,
    )


def may_load_torch(config: Config, model: Model) -> bool:
    """Says whether the engine may import torch, as far as the settings and the model tell."""
    reasons = (*_settings_with_torch(config), *_models_with_torch(config, model))
    return bool(reasons) or (config.device == "auto" and may_have_cuda())


def _settings_with_torch(config: Config) -> Iterator[Reason]:
    """Yields the settings that nothing but torch can honour."""
    if config.device == "cuda":
        yield Reason("--device cuda", "device")
    if config.model_impl == "transformers":
        yield Reason("--model-impl transformers", "model_impl", ("torch", "transformers"))
    if config.kernels in ("torch", "tree"):
        yield Reason(f"--kernels {config.kernels}", "kernels")
    if config.tensor_parallel_size > 1:
        yield Reason(f"--tensor-parallel-size {config.tensor_parallel_size}", "tensor_parallel_size")
    if config.pipeline_parallel_size > 1:
        yield Reason(f"--pipeline-parallel-size {config.pipeline_parallel_size}", "pipeline_parallel_size")
    if config.attention_backend not in (AUTO, NATIVE):
        yield Reason(f"--attention-backend {config.attention_backend}", "attention_backend")
    if config.dtype == "float16":
        yield Reason("--dtype float16", "dtype")
    if isinstance(config.replicas, str) and config.replicas.startswith("ray://"):
        yield Reason("--replicas ray://…", "replicas", ("ray", "cryptography"))
    if not native.is_built():
        yield Reason(NOTHING_COMPUTES, "kernels")


def _models_with_torch(config: Config, model: Model) -> Iterator[Reason]:
    """Yields what nothing but torch can compute of the model here."""
    hf = model_config(model.source)
    if config.dtype == "bfloat16" and is_encoder(hf):
        yield Reason("--dtype bfloat16, for an encoder,", "dtype")


def _require_torch(reasons: Iterator[Reason]) -> None:
    """Raises StartupError naming the first reason for which something is not installed."""
    for reason in reasons:
        if reason.what == NOTHING_COMPUTES and not is_installed("torch"):
            raise StartupError(NOTHING_COMPUTES, field=reason.field)
        require(reason.what, *reason.modules, field=reason.field)


def architectures() -> list[str]:
    """Returns the names of architectures in a config.json that this version can run."""
    return sorted(declared("tureen.models", "ARCHITECTURES") | declared("tureen.models", ENCODERS))


def make_engine(
    config: Config,
    *,
    model: Model | None = None,
    progress: Progress = no_progress,
    weights_descriptor: int | None = None,
) -> tuple[SteppedEngine, EngineInfo]:
    """Loads the weights and wires an engine; the process client calls this in the child. `weights_descriptor`: of the
    file in which engines of other processes find these weights, see SharedWeights. Raises StartupError."""
    source, tokenizer = model or find_model(config, progress=progress)
    wait_politely()  # before torch is loaded
    hf_config = model_config(source)
    if is_encoder(hf_config):
        if config.draft_model is not None:
            message = f"--draft-model: {source.name} is an encoder and generates no text; leave the draft model out"
            raise StartupError(message, field="draft_model")
        return _encoder_engine(config, source, hf_config, tokenizer, progress)
    return _text_engine(config, source, hf_config, tokenizer, progress, _shared(weights_descriptor))


def _shared(descriptor: int | None) -> SharedWeights | None:
    if descriptor is None:
        return None
    from tureen.runner.shared_weights import SharedWeights  # noqa: PLC0415 - few servers need it

    return SharedWeights(descriptor)


def _encoder_engine(
    config: Config, source: ModelSource, hf_config: Mapping[str, Any], tokenizer: Tokenizer, progress: Progress
) -> tuple[EmbeddingEngine, EngineInfo]:
    """Raises StartupError."""
    from tureen.runner.embedder import load_embedder  # noqa: PLC0415 - few models need it

    started = time.monotonic()
    embedder = load_embedder(source, config, progress)
    limit = embedder.max_tokens
    engine = EmbeddingEngine(
        embedder,
        tokenizer,
        max_tokens=limit,
        max_queued=config.max_queued_requests,
        token_budget=config.chunked_prefill_size,
        schedule=Schedule(config.schedule_policy, config.enable_priority_scheduling),
    )
    info = EngineInfo(
        model_path=config.model_path,
        model_name=config.served_model_name or source.name,
        architecture=architecture_of(hf_config),
        model_type=hf_config.get("model_type", "unknown"),
        device=embedder.place.device,
        dtype=embedder.place.dtype,
        vocab_size=embedder.config.vocab_size,
        context_len=limit,
        max_total_tokens=limit,
        page_size=1,
        kv_bytes_per_token=0,
        max_running_requests=1,
        eos_token_ids=(),
        load_seconds=time.monotonic() - started,
        files=files_of(source),
        **file_facts(source)._asdict(),
        **_purpose(source, hf_config, tokenizer, embedder.config.hidden_size),
    )
    return engine, info


def _purpose(source: ModelSource, hf: Mapping[str, Any], tokenizer: Tokenizer, state_size: int) -> dict[str, Any]:
    """Returns the fields of EngineInfo that tell what the model is for. `state_size`: of the last layer's output.
    Raises StartupError."""
    sentence = source.sentence
    common = {"prompts": sentence.prompts, "default_prompt": sentence.default_prompt, "similarity": sentence.similarity}
    kind = model_kind(source)
    if kind == "classifier":
        classifier = classifier_of(hf, sentence)
        return common | {"classifier": classifier, "hidden_size": len(classifier.labels)}
    if kind == "embedder":
        size = sentence.dense[-1].outputs if sentence.dense else state_size
        sizes = embedding_sizes(hf, size)
        return common | {"pooling": sentence.pooling or "mean", "hidden_size": size, "embedding_sizes": sizes}
    sizes = embedding_sizes(hf, state_size)
    return {
        "judge": judge_of(source, tokenizer.chat_template, tokenizer.token_id),
        "hidden_size": state_size,
        "embedding_sizes": sizes,
    }


def _as_trained(config: Config, source: ModelSource, hf: Mapping[str, Any]) -> Config:
    """Returns the settings with the length that an embedding model or a reranker was trained with, unless
    --context-length is set."""
    trained, positions = source.sentence.max_tokens, hf.get("max_position_embeddings")
    if trained is None or config.context_length is not None:
        return config
    length = min(trained, positions) if isinstance(positions, int) else trained
    return msgspec.structs.replace(config, context_length=length)


def _text_engine(
    config: Config,
    source: ModelSource,
    hf_config: Mapping[str, Any],
    tokenizer: Tokenizer,
    progress: Progress,
    shared: SharedWeights | None,
) -> tuple[Engine, EngineInfo]:
    """Raises StartupError."""
    started = time.monotonic()
    draft = None if config.draft_model is None else _find_draft(config, Model(source, tokenizer), progress)
    config, generates = _as_trained(config, source, hf_config), model_kind(source) == "generator"
    runner = load_runner(source, config, progress=progress, shared=shared, draft=draft.need if draft else NO_DRAFT)
    eos_token_ids = tuple(sorted({*hf_config.get("eos_token_id", ()), *tokenizer.eos_token_ids}))
    engine = Engine(
        runner,
        tokenizer,
        eos_token_ids=eos_token_ids,
        compiler=_compiler(config, tokenizer, eos_token_ids, runner.capacity().vocab_size) if generates else None,
        max_queued=config.max_queued_requests,
        token_budget=config.chunked_prefill_size,
        schedule=Schedule(config.schedule_policy, config.enable_priority_scheduling),
        prefix_cache=not config.disable_radix_cache,
    )
    kept: dict[str, str] = {}
    with _closed_on_failure(engine):
        if generates:
            _set_pace(engine, config, runner, draft, progress)
        if runner.processors is not None:
            engine.preparing.client_code.allow(runner.processors)
        engine.preparing.check = runner.check
        budget = MemoryBudget(int((1 - FRONT_SHARE) * helper_bytes(config)))
        engine.preparing.grammars.share(budget)
        engine.preparing.client_code.share(budget)
        if config.kv_disk is not None:
            from tureen.kv_offload.attach import attach  # noqa: PLC0415 - few servers keep pages

            kept = attach(engine, runner, config, tokenizer.all_token_bytes())
        _load_adapters(engine, config.lora_paths, model_name=config.served_model_name or source.name)
    seconds = time.monotonic() - started
    adapters = engine.adapters.paths()
    info = _describe(
        config, source, hf_config, runner, eos_token_ids, tokenizer, load_seconds=seconds, adapters=adapters
    )
    weights = weights_digest(source) if config.sessions_db is not None else ""
    return engine, msgspec.structs.replace(info, weights=weights, **kept)


def _find_draft(config: Config, target: Model, progress: Progress) -> DraftOnDisk:
    """Fetches the draft model if it is not on disk. Raises StartupError if it cannot guess tokens of `target`."""
    from tureen.runner import draft as draft_loading  # noqa: PLC0415 - few servers have a draft model

    draft_loading.check_settings(config)
    settings = draft_loading.draft_config(config)
    try:
        source, tokenizer = find_model(settings, progress=progress)
    except StartupError as error:
        raise draft_loading.refused(config, error.message.replace("--model-path", "--draft-model")) from None
    vocabularies = target.tokenizer.all_token_bytes(), tokenizer.all_token_bytes()
    draft_loading.check_models(config, (target.source, source), vocabularies)
    return draft_loading.DraftOnDisk(source, settings, draft_loading.need_of(source, settings))


def _set_pace(engine: Engine, config: Config, target: ModelRunner, draft: DraftOnDisk | None, say: Progress) -> None:
    """Sets the goal for gaps, and makes the engine guess tokens, also with a draft model. Raises StartupError."""
    if config.itl_goal_ms is not None:
        from tureen.engine.pacing import Pacer  # noqa: PLC0415 - few servers have a goal

        engine.rows.pacer = pacer = Pacer(config.itl_goal_ms / 1000, config.chunked_prefill_size)
        engine.scheduler.token_budget = pacer.token_budget
    if not config.speculative or not target.capacity().takes_guesses:
        return
    engine.rows.guesser = guesser = Guesser(native.require())
    if draft is not None:
        from tureen.engine.draft_model import DraftModel  # noqa: PLC0415 - few servers have a draft model
        from tureen.runner.draft import load_draft  # noqa: PLC0415

        runner = load_draft(draft.source, draft.settings, target, draft.need, say)
        guesser.draft_model = DraftModel(runner, target.capacity().vocab_size, config.chunked_prefill_size)
    engine.scheduler.drafters = Drafters(guesser.guess, None if draft is None else guesser.draft)


@contextmanager
def _closed_on_failure(engine: Engine) -> Iterator[None]:
    """Closes the engine if the rest of its start fails: its helper processes would live on."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def _load_adapters(engine: Engine, settings: tuple[str, ...], *, model_name: str) -> None:
    """Raises StartupError naming the setting at fault."""
    for setting in settings:
        name, path = adapter_of(setting)
        if not (name and path):
            raise StartupError(
                f"--lora-paths {setting}: must be NAME=PATH, PATH, or a JSON object in SGLang's form",
                field="lora_paths",
            )
        if name == model_name:
            raise StartupError(f"--lora-paths {setting}: {name} is the model's own name", field="lora_paths")
        try:
            engine.call("load_adapter", name=name, path=path)
        except TureenError as error:
            raise StartupError(f"--lora-paths {setting}: {error.message}", field="lora_paths") from None


def _compiler(config: Config, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], vocab_size: int) -> Compiler | None:
    if config.grammar_backend == "none":
        return None
    if config.grammar_backend != "tureen":
        log.warning("--grammar-backend %s has no effect: tureen's own grammar engine is used", config.grammar_backend)
    if why := why_unconstrained():
        log.warning("constrained outputs are refused: %s", why)
        return None
    return Compiler(
        partial(vocabulary_of, tokenizer, eos_token_ids, vocab_size, config.tool_call_parser),
        partial(tokenizer.encode, add_special_tokens=False),
        timeout_s=config.grammar_compile_timeout_s,
        kept=KeptGrammars(cache_dir(config) / "grammars") if config.grammar_cache else None,
    )


def vocabulary_of(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], vocab_size: int, parser: str) -> Vocabulary:
    """Returns the vocabulary for constraints. Special tokens have no text; if they mark tool calls, `specials` has it.

    vocab_size: number of the model's logits. parser: the value of --tool-call-parser.
    """
    tokens = tokenizer.all_token_bytes()[:vocab_size]
    texts = {token_id: token.content for token_id, token in tokenizer.added_tokens.items() if token.special}
    is_marked = marks_calls(texts.values(), parser)
    free = sorted(texts.keys() - set(eos_token_ids)) if is_marked else ()
    specials = tuple((token_id, texts[token_id].encode()) for token_id in free if token_id < len(tokens))
    for token_id in tokenizer.special_ids | set(eos_token_ids):
        if token_id < len(tokens):
            tokens[token_id] = b""
    return Vocabulary(tuple(tokens), eos_token_ids, vocab_size, specials)


def _describe(
    config: Config,
    source: ModelSource,
    hf_config: Mapping[str, Any],
    runner: Runner,
    eos_token_ids: tuple[int, ...],
    tokenizer: Tokenizer,
    *,
    load_seconds: float,
    adapters: dict[str, str],
) -> EngineInfo:
    capacity = runner.capacity()
    device = runner.call("device")
    return EngineInfo(
        model_path=config.model_path,
        model_name=config.served_model_name or source.name,
        architecture=(hf_config.get("architectures") or ["unknown"])[0],
        model_type=hf_config.get("model_type", "unknown"),
        device=device["name"],  # type: ignore[index]
        dtype=device["dtype"],  # type: ignore[index]
        activations=device["activations"],  # type: ignore[index]
        processor=device.get("processor", ""),  # type: ignore[attr-defined]
        vocab_size=capacity.vocab_size,
        context_len=capacity.context_len,
        max_total_tokens=capacity.num_pages * capacity.page_size,
        page_size=capacity.page_size,
        kv_bytes_per_token=capacity.kv_bytes_per_token,
        max_running_requests=capacity.max_rows,
        eos_token_ids=eos_token_ids,
        bos_token_id=tokenizer.bos_token_id,
        load_seconds=load_seconds,
        adapters=adapters,
        generation_defaults=generation_defaults(source),
        rope_factors=device.get("rope_factors"),  # type: ignore[attr-defined]
        files=files_of(source),
        **file_facts(source)._asdict(),
        **_purpose(source, hf_config, tokenizer, capacity.hidden_size),
    )


def engine_mode(config: Config) -> str:
    """Returns `thread` or `process`: where the engine will run. Looks for the device without importing torch."""
    if config.engine != "auto":
        return config.engine
    if has_ranks(config):
        return "process"
    on_cuda = config.device == "cuda" or (config.device == "auto" and may_have_cuda())
    return "process" if on_cuda else "thread"


async def connect(
    config: Config, model: Model, *, progress: Progress = no_progress, weights_descriptor: int | None = None
) -> InprocClient | ProcessClient:
    """Starts an engine. Returns its client once the engine is ready. `weights_descriptor`: see make_engine; for an
    engine in a process. Raises StartupError."""
    client: InprocClient | ProcessClient
    if engine_mode(config) == "process":
        client = ProcessClient("tureen.build:make_engine", config, weights_descriptor)
    else:
        client = InprocClient(
            lambda report: make_engine(config, model=model, progress=report),
            watchdog_timeout_s=config.watchdog_timeout_s,
        )
    await client.start(progress)
    return client
