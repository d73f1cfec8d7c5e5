"""Starts a server of several models: the default model with it, the others when they are asked for."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import msgspec
from starlette.applications import Starlette

from tureen.app.application import all_routes, build_app, fitting
from tureen.build import Model, connect, fetch_model, find_model, may_load_torch, media_loader
from tureen.config import Config
from tureen.devices.cpu import free_bytes
from tureen.errors import StartupError, TureenError
from tureen.http.dialect import Entry
from tureen.log import Progress, get_logger
from tureen.media.loader import MediaLoader
from tureen.metrics import Metrics
from tureen.multi_model.edge import spread
from tureen.multi_model.fleet import Fleet
from tureen.multi_model.member import Member
from tureen.multi_model.settings import check_names, each_model, for_embeddings, name_of, one_model, own_names
from tureen.multi_model.sharing import Sharing
from tureen.multi_model.sizes import size_of
from tureen.requests.state import ServerState, make_context
from tureen.runner.embedder import refuse_settings
from tureen.runner.kinds import is_encoder
from tureen.serving.dry_run import dry_run
from tureen.serving.healing import HealingClient
from tureen.weights.source import model_config

log = get_logger("fleet")


async def start(config: Config, progress: Progress) -> Launcher:
    """Loads the default model of `config.models`; the others can be loaded then. Raises StartupError."""
    if config.sessions_db is not None:
        raise StartupError(
            "--sessions-db with several models: durable sessions belong to one model; leave one of them out",
            field="sessions_db",
        )
    configs = each_model(config)
    names = [name_of(own) for own in configs]
    check_names(names)
    members = [
        Member(msgspec.structs.replace(own, served_model_name=name), name, own=frozenset(own_names(table)))
        for own, name, table in zip(configs, names, config.models, strict=True)
    ]
    limit_bytes = config.models_memory or int(free_bytes() * config.mem_fraction_static)
    launcher = Launcher(config, progress)
    launcher.fleet = Fleet(members, limit_bytes, launcher)
    await launcher.fleet.begin()
    return launcher


class Launcher:
    """Finds models, and starts their engines."""

    fleet: Fleet

    def __init__(self, config: Config, progress: Progress) -> None:
        """`config`: the server's. `progress`: shows the start of the default model."""
        self.app: Starlette | None = None
        self._config = config
        self._progress = progress
        self._sharing = Sharing()
        self._models: dict[tuple[object, ...], Model] = {}  # that were found; two models may be of the same files

    async def measure(self, member: Member, share_bytes: int) -> int:
        """Returns the bytes that a model needs; its KV cache takes what is left of `share_bytes`. Raises
        StartupError."""
        model = await self._find(member)
        if is_encoder(model_config(model.source)):
            member.config = for_embeddings(member.config, member.own)
            refuse_settings(member.config)
        uses_torch = may_load_torch(member.config, model)
        size = await asyncio.to_thread(size_of, model.source, member.config, share_bytes, uses_torch=uses_torch)
        if size.num_tokens and member.client is None:
            member.config = msgspec.structs.replace(member.config, max_total_tokens=size.num_tokens)
            if not uses_torch:
                others = (other.config for other in self.fleet.members if other is not member)
                member.share = self._sharing.share(member.config, others, size.weight_bytes)
        return size.num_bytes

    async def launch(self, member: Member) -> None:
        """Starts a model's engine for the first time, and makes its routes. Raises StartupError."""
        model, config = await self._find(member), member.config
        client, media = await self._connect(member, model)
        member.client = client
        try:
            if self.app is None:
                self.app = build_app(client, model.tokenizer, config, media=media, arrange=self._spread)
                member.state = self.app.state.server
            else:
                without_batches = msgspec.structs.replace(
                    config, batch_path=None
                )  # the default model's routes run them
                context = make_context(model.tokenizer, client.info, without_batches, media)
                common = self.app.state.server.common
                member.state = ServerState(client, context, Metrics(client.info.model_name), media, common)
                member.entries = fitting(member.state, all_routes(member.state))
        except BaseException:
            member.client = None
            await client.close()
            raise

    def adopt(self, name: str) -> Member:
        """Returns a model that the server was not started with, by where it comes from, with the server's settings.
        Raises StartupError for a path at which there is none."""
        config = one_model(self._config, {"model_path": name}, name)
        known_as = name_of(config)
        return Member(msgspec.structs.replace(config, served_model_name=known_as), known_as)

    def path_of(self, member: Member) -> Path:
        """Returns where the files of a model are that was found."""
        return self._models[_files_of(member.config)].source.path

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the models beside the default one."""
        return tuple(member.name for member in self.fleet.members[1:])

    async def _connect(self, member: Member, model: Model) -> tuple[HealingClient, MediaLoader | None]:
        """Starts an engine, and what loads pictures for it. Raises StartupError."""
        media = media_loader(member.config, model)
        descriptor = None if member.share is None else member.share.weights.descriptor
        progress = self._progress_of(member)
        return await connect(member.config, model, progress=progress, weights_descriptor=descriptor), media

    def _progress_of(self, member: Member) -> Progress:
        return self._progress if self.app is None else member.loads.note_phase

    def _spread(self, state: ServerState, entries: list[Entry]) -> list[Entry]:
        """Returns the application's routes: those of the default model, each of which passes requests on."""
        state.common.models = self.fleet
        state.lifecycle.services.append(self.fleet)
        self.fleet.default.entries = fitting(state, [copy.copy(entry) for entry in entries])
        spread(entries, self.fleet)
        return entries

    async def _find(self, member: Member) -> Model:
        """Raises StartupError."""
        config = member.config
        files = _files_of(config)
        if files not in self._models:
            progress = self._progress_of(member)
            if self.app is not None:  # a file that freezes its reader must not freeze the other models
                await _try_reading(config, progress)
            self._models[files] = await asyncio.to_thread(find_model, config, progress=progress)
        return self._models[files]


async def _try_reading(config: Config, progress: Progress) -> None:
    """Fetches a model and reads its files in a process of their own. Raises StartupError."""
    path = await asyncio.to_thread(fetch_model, config, progress=progress)
    try:
        await dry_run("load_model", {"path": str(path)}, config)
    except TureenError as error:
        raise StartupError(error.message, field="model_path") from None


def _files_of(config: Config) -> tuple[object, ...]:
    """Returns what tells one model's files, its tokenizer and its adapters from another's."""
    mmproj = "" if config.language_model_only else config.mmproj
    own = (config.model_path, config.revision, config.tokenizer_path, config.chat_template)
    return (*own, mmproj, config.lora_paths)
