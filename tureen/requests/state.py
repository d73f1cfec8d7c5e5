"""The state that all handlers of one server share."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import msgspec

from tureen.clients.keys import load_keys
from tureen.clients.queue_room import Admitted, QueueRoom
from tureen.clients.quotas import Quotas
from tureen.config import Config
from tureen.contract.params import SamplingParams, check_params
from tureen.contract.types import PICTURE, VIDEO, EngineInfo
from tureen.errors import InvalidRequest, StartupError, Unavailable, echo, not_loaded
from tureen.fields.body import convert, read_json, read_params
from tureen.media.base import Family
from tureen.media.loader import MediaLoader
from tureen.metrics import Metrics
from tureen.recordings.recording import Recordings
from tureen.requests import template_pool
from tureen.requests.helpers import Helpers
from tureen.sandbox.budget import FRONT_SHARE, MemoryBudget, helper_bytes
from tureen.serving.client import EngineClient
from tureen.serving.dry_run import dry_run
from tureen.serving.streams import Interval
from tureen.sessions.sessions import Sessions
from tureen.text.chat_template import ChatTemplates, load_chat_templates
from tureen.text.reasoning import ReasoningFormat, reasoning_format
from tureen.text.tokenizer import Tokenizer
from tureen.text.tools import ToolFormat, tool_format

if TYPE_CHECKING:
    from tureen.clients.use_keeping import UseKeeper
    from tureen.requests.other_fronts import OtherFronts
    from tureen.serving.coalescing import Gathering

DRAIN_RETRY_S = 5

Standing = Literal["unloaded", "loading", "loaded", "unloading"]


class Context(msgspec.Struct, frozen=True, dict=True):
    """Facts about the model and the settings that are needed to read a body."""

    tokenizer: Tokenizer
    info: EngineInfo
    config: Config
    defaults: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    """Default sampling parameters: the server's, which take precedence, and the model's."""
    family: Family | None = None  # the model family's form of pictures in prompts; None: the model takes text only
    chat_templates: ChatTemplates | str = ""  # a str: why there is none
    tool_format: ToolFormat | None = None  # the model's format of tool calls; None: tools are refused
    reasoning_format: ReasoningFormat | None = None  # its marks of reasoning; None: it does not reason
    draw_bits: Callable[[int], int] = secrets.randbits  # draws seeds for requests without one

    @cached_property
    def capacity(self) -> int:
        """Maximum number of tokens of one request, prompt and output together."""
        return min(self.info.context_len, self.info.max_total_tokens)

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        """Texts that are placeholders of a picture or a video in a prompt."""
        marks = () if self.family is None else (self.family.placeholder, self.family.video_placeholder)
        return tuple(mark for mark in marks if mark is not None)

    @cached_property
    def placeholder_ids(self) -> frozenset[int]:
        """Tokens that are placeholders of a picture or a video; in some models they are beyond the vocabulary's end."""
        ids = () if self.family is None else (self.family.placeholder_id, self.family.video_placeholder_id)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def probe_templates(self) -> None:
        """Tests the chat templates' features, so that the first chat does not wait for that. Raises Unavailable."""
        if not isinstance(self.chat_templates, str):
            with contextlib.suppress(InvalidRequest):  # a template at its limit: each chat gets that error
                self.chat_templates.plain.probe()
                self.chat_templates.with_tools.probe()


def make_context(tokenizer: Tokenizer, info: EngineInfo, config: Config, media: MediaLoader | None = None) -> Context:
    """Collects the facts that are needed to read bodies.

    Raises StartupError when the sampling defaults of --preferred-sampling-params or of the model are not valid, or a
    chat template or a format cannot be used.
    """
    model: dict[str, Any] = dict(info.generation_defaults) if config.sampling_defaults == "model" else {}
    server: dict[str, Any] = {}
    where = "the sampling parameters that the model recommends (--sampling-defaults openai does without them)"
    try:
        _check_defaults(model, info)
        where = "--preferred-sampling-params"
        if config.preferred_sampling_params is not None:
            server = read_params(read_json(None, config.preferred_sampling_params.encode()), where)
            _check_defaults(model | server, info)
    except InvalidRequest as error:
        raise StartupError(f"{where}: {error.message}") from None
    family = None if media is None else media.family
    _require_tokens(() if family is None else family.part_tokens, tokenizer, info)
    templates = _chat_templates(tokenizer, config, family)
    taught = "" if isinstance(templates, str) else templates.with_tools.source
    return Context(
        tokenizer,
        info,
        config,
        (server, model),
        family,
        templates,
        tool_format(config.tool_call_parser, taught),
        reasoning_format(config.reasoning_parser, taught),
        secrets.randbits if config.random_seed is None else random.Random(config.random_seed).getrandbits,
    )


def _require_tokens(texts: tuple[str, ...], tokenizer: Tokenizer, info: EngineInfo) -> None:
    """Raises StartupError unless each text is a token of the model."""
    for text in texts:
        token_id = tokenizer.token_id(text)
        if token_id is None or token_id >= info.vocab_size:
            raise StartupError(
                f"the tokenizer has no token {text}, which pictures of this model need; use the model's own tokenizer",
                field="tokenizer_path",
            )


def _chat_templates(tokenizer: Tokenizer, config: Config, family: Family | None) -> ChatTemplates | str:
    """Loads the templates, with the placeholders of pictures and videos. Raises StartupError."""
    pictures: dict[str, tuple[str, int]] = {}
    if family is not None:
        pictures["image"] = (family.placeholder, PICTURE)
        if family.video_placeholder is not None:
            pictures["video"] = (family.video_placeholder, VIDEO)
    return load_chat_templates(
        config.chat_template,
        tokenizer,
        pictures,
        allow_spelled=config.allow_special_tokens_in_messages,
        do=template_pool.do,
    )


def _check_defaults(values: dict[str, Any], info: EngineInfo) -> None:
    check_params(convert(values, SamplingParams), vocab_size=info.vocab_size)


class Service(Protocol):
    """Background work while the server runs."""

    def start(self) -> None:
        """Begins. Called when the server is about to accept requests."""

    def drain(self) -> None:
        """Drops work that would delay the server's end."""

    async def close(self) -> None:
        """Ends all of it."""


class Lifecycle:
    """Whether the server shuts down, and what starts and ends with it."""

    def __init__(self) -> None:
        self.is_draining = False
        self.services: list[Service] = []

    def start(self) -> None:
        """Starts the services."""
        for service in self.services:
            service.start()

    def drain(self) -> None:
        """Stops accepting new requests."""
        self.is_draining = True
        for service in self.services:
            service.drain()

    async def close(self) -> None:
        """Ends the services."""
        for service in self.services:
            await service.close()


class ServedModel(Protocol):
    """One of several models."""

    name: str
    config: Config
    standing: Standing
    state: ServerState | None  # None: it was never loaded
    need_bytes: int  # of memory; 0 = not known yet

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that requests may ask for: name -> path."""

    def report(self) -> dict[str, Any]:
        """Returns its entry in `/status`."""


class ServedModels(Protocol):
    """All models of a server that has several; the first is the default model."""

    @property
    def members(self) -> Sequence[ServedModel]:
        """The models, in the order of the settings."""

    def find(self, name: str) -> ServedModel | None:
        """Returns the model that a request's `model` means, or None."""

    def names(self) -> list[str]:
        """Returns the names that requests may use: models and their adapters."""

    async def load(self, name: str) -> ServedModel:
        """Loads a model; one that is not in the list yet joins it. Raises TureenError."""

    async def unload(self, name: str) -> ServedModel:
        """Unloads an unused model. Raises NotFound, Conflict."""

    async def pull(self, name: str) -> ServedModel:
        """Fetches a model's files, without loading it; it joins the list. Raises TureenError."""

    def pause_later(self, *, is_paused: bool) -> None:
        """Sets whether models that are not loaded now are paused when they are loaded."""

    def retire(self, state: ServerState) -> None:
        """Unloads the model of a state after its requests have ended."""

    def report(self) -> dict[str, Any]:
        """Returns the entries of all models in `/status`."""


class Common:
    """The state that all models of one server share. Event-loop thread only."""

    def __init__(self, config: Config) -> None:
        self.states: list[ServerState] = []  # of each loaded model; the first is the default model's
        self.models: ServedModels | None = None  # None: there is one model
        self.keys = load_keys(config)
        self.quotas = Quotas(config)
        self.fronts: OtherFronts | None = None  # None: this is the only front
        self.recordings = Recordings(config)
        self.lifecycle = Lifecycle()
        self.use = open_use(config, self.quotas)
        if self.use is not None:
            self.lifecycle.services.append(self.use)
        self.started_s = time.monotonic()
        self.runs: dict[Any, ServerState] = {}  # unfinished runs (generation.py: Run) -> their model
        self.background: dict[tuple[str, str], Any] = {}  # background responses, by client and id
        self.helper_memory = MemoryBudget(int(FRONT_SHARE * helper_bytes(config)))
        self.admitted = Admitted()

    @property
    def loaded(self) -> list[ServerState]:
        """The states of the loaded models."""
        return [state for state in self.states if state.client.health.state != "unloaded"]

    @property
    def num_running(self) -> int:
        """Number of unfinished requests of all models and fronts."""
        elsewhere = 0 if self.fronts is None else self.fronts.num_running
        return sum(state.num_running for state in self.states) + elsewhere

    def abort(self, rid: str | None, reason: str = "client", *, owner: str | None = None) -> int:
        """Aborts the requests named `rid` (None = all) of `owner` (None = of any). Returns their number."""
        return sum(state.abort(rid, reason, owner=owner) for state in self.states)

    def abort_all(self, reason: str) -> int:
        """Aborts all requests of all fronts. Returns their number."""
        elsewhere = 0 if self.fronts is None else self.fronts.abort_all(reason)
        return self.abort(None, reason) + elsewhere

    async def close(self) -> None:
        """Ends recordings, background responses, services and helper processes. The engines' clients are closed
        elsewhere."""
        if self.recordings.responses is not None:
            self.abort(None, "shutdown")
        await self.recordings.close()
        await self.lifecycle.close()
        for state in self.states:
            await state.helpers.close()


def open_use(config: Config, quotas: Quotas) -> UseKeeper | None:
    """Opens the file of --usage-db; None if the clients' use is not stored. Raises StartupError."""
    if config.usage_db is None:
        return None
    keeping = importlib.import_module("tureen.clients.use_keeping")  # SQLite, for servers that keep something only
    keeper: UseKeeper = keeping.UseKeeper(quotas, config.usage_db)
    return keeper


class ServerState:
    """The state of one model: the engine, its metrics, and the unfinished requests. Event-loop thread only."""

    def __init__(
        self,
        client: EngineClient,
        context: Context,
        metrics: Metrics,
        media: MediaLoader | None = None,
        common: Common | None = None,
    ) -> None:
        """`media`: None for a text-only model. `common`: the state that it shares with the server's other models; None
        = it is the first."""
        self.common = common = common or Common(context.config)
        common.states.append(self)
        self.client = client
        self.media = media
        self.adapters = dict(context.info.adapters)  # loaded LoRA adapters: name -> path
        self.context = context
        self.metrics = metrics
        self.sessions = Sessions(context.tokenizer, context.config, abort=client.abort)
        self.quotas = common.quotas
        self.recordings = common.recordings
        self.lifecycle = common.lifecycle
        self.helpers = Helpers(media, common.helper_memory)
        self._running: dict[tuple[str, str], tuple[str, ...]] = {}  # (owner, its name for them) -> engine's ids
        self._loading: dict[str, Callable[[str], None]] = {}  # id of a request not in the engine yet -> abort(reason)
        self._numbers = itertools.count(1)  # numbers of requests, part of their ids
        self.room = QueueRoom(
            client,
            context.info,
            context.config,
            common.admitted,
            lambda: [run for run, state in common.runs.items() if state is self],
        )

    @cached_property
    def interval(self) -> Interval:
        """Tokens per event, or the object that merges events while this process is busy."""
        if self.context.config.stream_interval != "auto":
            return self.context.config.stream_interval
        gathering: Gathering = importlib.import_module("tureen.serving.coalescing").Gathering()
        return gathering

    @property
    def helpers_down(self) -> tuple[str, ...]:
        """Names of helper processes that are being replaced. Those of the engine are from its last report."""
        return (*self.client.stats.helpers_down, *self.helpers.down)

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len({request_id for group in self._running.values() for request_id in group})

    def check_adapter(self, name: str, field: str) -> None:
        """Raises NotFound with `field` when no adapter of this name or path is loaded."""
        if name not in self.adapters and name not in self.adapters.values():
            raise not_loaded(name, field)

    async def change_adapters(self, op: str, **args: str) -> dict[str, str]:
        """Calls the engine's operation `op` on adapters. Returns the adapters loaded afterwards: name -> path."""
        config, served = self.context.config, self.context.info.model_path
        if served != config.model_path:  # the weights were replaced, and --revision is that of the first model
            config = msgspec.structs.replace(config, model_path=served, revision=None)
        await dry_run(op, args, config)
        self.adapters = cast("dict[str, str]", await self.client.call(op, **args))
        return self.adapters

    def serve_weights(self, *, path: str | None = None, version: str | None = None) -> None:
        """Sets the model path and the version of the weights that answers name; None = unchanged."""
        info, config = self.context.info, self.context.config
        if path is not None:
            info = msgspec.structs.replace(info, model_path=path)
        if version is not None:
            config = msgspec.structs.replace(config, weight_version=version)
        self.context = msgspec.structs.replace(self.context, info=info, config=config)

    def check_open(self) -> None:
        """Raises Unavailable if the server is shutting down."""
        if self.lifecycle.is_draining:
            raise Unavailable(
                "the server is shutting down; try another one", code="draining", retry_after_s=DRAIN_RETRY_S
            )

    def check_accepting(self) -> None:
        """Raises Unavailable if the server is shutting down or its queue is full."""
        self.check_open()
        self.room.check(1)

    def number_from(self, first: int) -> None:
        """Numbers requests from `first` on. The numbers of several fronts must differ."""
        self._numbers = itertools.count(first)

    def new_id(self, rid: str) -> str:
        """Returns an id of a request for the engine, which is unique whatever the client's name for it. Thread-safe."""
        return f"{next(self._numbers)}:{rid}"

    def enter(self, owner: str, names: dict[str, tuple[str, ...]]) -> None:
        """Registers running requests under the names with which `owner` may abort them: name -> engine's ids. Raises
        InvalidRequest if a name is in use."""
        self.check_names(owner, names)
        self._running.update({(owner, name): ids for name, ids in names.items()})

    def check_names(self, owner: str, names: Iterable[str]) -> None:
        """Raises InvalidRequest when a running request of `owner` has one of the names."""
        for name in names:
            if (owner, name) in self._running:
                raise InvalidRequest(
                    f"rid {echo(name)} is in use by a request that has not ended; choose another or leave it out",
                    field="rid",
                    code="duplicate_rid",
                )

    def leave(self, owner: str, names: dict[str, tuple[str, ...]]) -> None:
        """Removes the names that `enter` registered."""
        for name in names:
            del self._running[owner, name]

    @contextlib.contextmanager
    def loading(self, owner: str, names: Mapping[str, tuple[int, ...]], abort: Callable[[str], None]) -> Iterator[None]:
        """Registers requests that the engine does not have yet; aborting any of them calls `abort(reason)`.

        `names`: name -> indices of requests. Raises InvalidRequest when a name is in use.
        """
        indices = sorted({index for group in names.values() for index in group})
        ids = {index: self.new_id("") for index in indices}
        entered = {name: tuple(ids[index] for index in group) for name, group in names.items()}
        self.enter(owner, entered)
        self._loading.update(dict.fromkeys(ids.values(), abort))
        try:
            yield
        finally:
            self.leave(owner, entered)
            for request_id in ids.values():
                del self._loading[request_id]

    def abort(self, rid: str | None, reason: str = "client", *, owner: str | None = None) -> int:
        """Aborts the requests named `rid` (None = all) of `owner` (None = of any). Returns their number."""
        ids = {
            request_id
            for (holder, name), group in self._running.items()
            if rid in (None, name) and owner in (None, holder)
            for request_id in group
        }
        for request_id in ids:
            self._loading.get(request_id, partial(self.client.abort, request_id))(reason)
        return len(ids)
