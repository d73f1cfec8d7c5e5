"""Gives an engine the disk as a tier below its KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from tureen.config import Config
from tureen.contract.runner import PageMemory, Runner
from tureen.engine.engine import Engine
from tureen.engine.restoring import Restoring
from tureen.errors import StartupError, TureenError
from tureen.kv_offload.disk import DiskTier
from tureen.kv_offload.identity import FileDigests, Identity, folder_digest
from tureen.kv_offload.page_files import PageFiles, check_own


def attach(engine: Engine, runner: Runner, config: Config, tokens: Iterable[bytes]) -> dict[str, str]:
    """Has the engine keep pages in --kv-disk. Returns what EngineInfo says of them.

    `tokens`: the bytes of each token of the vocabulary. Raises StartupError.
    """
    assert config.kv_disk is not None
    if config.disable_radix_cache:
        raise StartupError(
            "--kv-disk needs the prefix cache; leave out --disable-radix-cache, or --kv-disk", field="kv_disk"
        )
    folder = _make(Path(config.kv_disk).expanduser())
    try:
        memory = cast("PageMemory", runner.call("page_memory"))
    except TureenError as error:
        raise StartupError(f"--kv-disk: {error.message}", field="kv_disk") from None
    files = PageFiles(folder / "pages", sizes=memory.sizes, max_bytes=config.kv_disk_size)
    digests = FileDigests(folder / "digests.json")
    identity = Identity(lambda: cast("dict[str, Any]", runner.call("kv_facts")), tokens, digests)
    tier = DiskTier(files, memory, engine.cache, identity.now)

    def add_adapter(number: str, path: str) -> None:
        with suppress(OSError):  # its files went away; pages that were computed with it are not kept
            tier.add_adapter(number, folder_digest(Path(path).expanduser()))

    engine.adapters.heed = add_adapter
    engine.preparing.restore_from(Restoring(tier, engine.scheduler))
    return {"kv_identity": identity.now().hex(), "kv_folder": files.folder_id}


def _make(folder: Path) -> Path:
    """Makes the folder, for its owner only, where there is none. Raises StartupError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(folder, folder.stat())
    except OSError as error:
        raise StartupError(f"--kv-disk {folder}: cannot use it: {error.strerror}", field="kv_disk") from None
    return folder
