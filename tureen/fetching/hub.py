"""Fetches models from the Hugging Face hub into a cache laid out as its own library does, so that both can share one.

A cache holds for each repository `blobs` by digest, `refs` (branch -> commit) and `snapshots` (commit -> links to
blobs). HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_TOKEN_PATH and HF_HUB_OFFLINE are honoured.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from tureen.errors import StartupError, echo
from tureen.fetching import ggufs
from tureen.fetching.download import BUSY, HttpFault, RemoteFile, Unreachable, disk_fault, fetch, open_url, read_url
from tureen.fetching.locks import locked
from tureen.files import read_regular
from tureen.log import BYTES, Progress, get_logger

ENDPOINT: Final = "https://huggingface.co"
INDEX: Final = "model.safetensors.index.json"
TAKEN: Final = re.compile(r"[^/]+\.(safetensors|json|jinja)|tokenizer\.model|\d+_\w+/(config\.json|model\.safetensors)")
"""Files of a repository that make up a model: those at the top, and the parts of an embedding model."""
PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
DIGEST: Final = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
COMMIT: Final = re.compile("[0-9a-f]{40}")
HEAD_BYTES: Final = 16 << 20
"""Bytes that hold the metadata of a GGUF file. The largest vocabularies take some 12 MiB."""
TRUE: Final = ("1", "on", "yes", "true")

log = get_logger("hub")


class Repository(NamedTuple):
    """A repository on the hub. `tag`: which of its GGUF files, by its quantisation or its name; "" = none named.
    `sees`: with the mmproj file, if the repository has one. `why_blind`: why that file is not fetched; "" if it is."""

    name: str  # ORG/NAME
    tag: str = ""
    revision: str = "main"
    sees: bool = False
    why_blind: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}:{self.tag}" if self.tag else self.name

    @property
    def folder(self) -> str:
        return "models--" + self.name.replace("/", "--")


def shared_cache() -> Path:
    """Returns the cache of the hub's own library."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(own).expanduser() if own else _home() / "hub"


def is_cache_chosen() -> bool:
    """Says whether somebody has named the hub's cache, so that models belong there."""
    return any(os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"))


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache, "huggingface")).expanduser()


def find_here(repository: Repository, roots: Iterable[Path]) -> Path | None:
    """Returns the model in the first cache that has all of it: a folder or a GGUF file; None where none has."""
    for root in roots:
        for snapshot in _snapshots(root / repository.folder, repository.revision):
            path = model_in(snapshot, repository.tag)
            if path is not None:
                return path
    return None


def _snapshots(folder: Path, revision: str) -> Iterator[Path]:
    try:
        commit = read_regular(folder / "refs" / revision).decode().strip()
    except (OSError, ValueError):
        commit = revision
    if COMMIT.fullmatch(commit) or (folder / "refs" / revision).exists():
        yield folder / "snapshots" / commit


def model_in(snapshot: Path, tag: str) -> Path | None:
    """Returns the model in a snapshot, which may be the rest of an interrupted download; None unless it is whole."""
    names = [path.relative_to(snapshot).as_posix() for path in _files_below(snapshot)]
    if not tag and _has_whole_folder(snapshot, names):
        return snapshot
    files = ggufs.choose(names, tag)
    return snapshot / files[0] if files and ggufs.is_whole(files) else None


def _files_below(folder: Path) -> list[Path]:
    """Returns the files, at most one folder deep. A link to what is not there is none."""
    return sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())


def _has_whole_folder(snapshot: Path, names: list[str]) -> bool:
    if "config.json" not in names:
        return False
    if INDEX not in names:
        return any(name.endswith(".safetensors") and "/" not in name for name in names)
    try:
        parts = set(json.loads(read_regular(snapshot / INDEX))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return parts <= set(names)


def pull(repository: Repository, root: Path, progress: Progress) -> Path:
    """Fetches what is missing of a model into the cache `root`. Returns its folder, or its (first) GGUF file.

    Raises StartupError with the fix.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE:
        raise _unreachable(repository, "HF_HUB_OFFLINE forbids access to the hub")
    try:
        commit, listed = _listing(repository)
        names = _fetched(repository, _chosen(repository, listed))
        home = root / repository.folder
        for folder in (home / "blobs", home / "refs", root / ".locks"):
            folder.mkdir(parents=True, exist_ok=True)
        waiting = f"wait for another process that fetches {repository.text}"
        with locked(root / ".locks" / f"{repository.folder}.lock", lambda: progress(waiting, 0, 0)):
            _fetch_all(repository, commit, {name: listed[name] for name in names}, home, progress)
    except (HttpFault, Unreachable) as fault:
        raise _refused(repository, fault) from None
    except OSError as error:
        raise StartupError(f"model {repository.text}: {disk_fault(error, root).message}") from None
    except StartupError as error:
        raise _named(repository, error) from None
    path = model_in(home / "snapshots" / commit, repository.tag)
    if path is None:
        raise StartupError(f"model {repository.text}: the repository has no complete model; name another, or one file")
    return path


def preview(repository: Repository, folder: Path) -> tuple[Path, int]:
    """Makes stand-ins of a model's files that hold no weights: config.json, or GGUF files with nothing but their head.

    Returns the model's folder or GGUF file, and the number of bytes that `pull` would fetch. Raises StartupError.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE:
        raise _unreachable(repository, "HF_HUB_OFFLINE forbids access to the hub")
    try:
        commit, listed = _listing(repository)
        names = _chosen(repository, listed)
        remotes = {name: _remote(repository, commit, name, listed[name]) for name in names}
        for name, remote in remotes.items():
            if name.endswith(".gguf") or name == "config.json":
                _write_head(remote, folder / Path(name).name)
    except (HttpFault, Unreachable) as fault:
        raise _refused(repository, fault) from None
    except StartupError as error:
        raise _named(repository, error) from None
    first = folder / Path(next(name for name in names if not ggufs.is_projector(name))).name
    total = sum(remotes[name].size or 0 for name in _fetched(repository, names))
    return first if first.suffix == ".gguf" else folder, total


def _write_head(remote: RemoteFile, place: Path) -> None:
    """Fetches the beginning of a file; the rest of the stand-in is a hole. Raises HttpFault, Unreachable."""
    headers = {**remote.headers, "Range": f"bytes=0-{HEAD_BYTES - 1}"}
    with open_url(remote.url, headers) as answer, place.open("wb") as file:
        try:
            file.write(answer.read(HEAD_BYTES))
        except (OSError, HTTPException) as error:
            raise Unreachable(str(error)) from None
        file.truncate(remote.size)


def _named(repository: Repository, error: StartupError) -> StartupError:
    return error if error.message.startswith("model ") else StartupError(f"model {repository.text}: {error.message}")


def _listing(repository: Repository) -> tuple[str, dict[str, dict[str, Any]]]:
    """Returns the commit, and what the hub says of each file. Raises HttpFault, Unreachable."""
    revision = quote(repository.revision, safe="")
    page, _ = read_url(f"{endpoint()}/api/models/{repository.name}/revision/{revision}?blobs=true", _headers())
    try:
        answer = json.loads(page)
        commit, files = answer["sha"], {str(file["rfilename"]): file for file in answer["siblings"]}
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"{endpoint()} does not answer like the hub") from None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise Unreachable(f"{endpoint()} names no commit")
    return commit, {name: file for name, file in files.items() if _is_safe(name)}


def _is_safe(name: str) -> bool:
    """Says whether a file's name stays in its folder."""
    return name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


def _chosen(repository: Repository, listed: Iterable[str]) -> list[str]:
    """Returns the names of the files to fetch. Raises StartupError where they are not a model, or several."""
    names = sorted(listed)
    weights = [name for name in names if TAKEN.fullmatch(name) and name.endswith(".safetensors")]
    if weights and not repository.tag:
        extra = {name for name in weights if name.startswith("consolidated")} if len(weights) > 1 else set()
        return [name for name in names if TAKEN.fullmatch(name) and name not in extra]
    files = ggufs.choose(names, repository.tag)
    if files:
        projector = ggufs.projector_for(files[0], names) if repository.sees else None
        return files if projector is None else [projector, *files]  # a pull that breaks off leaves no model without it
    tags = ggufs.tags(names)
    if tags and repository.tag:
        near = ggufs.nearest(repository.tag, tags)
        hint = f"; did you mean {repository.name}:{near}?" if near else ""
        raise StartupError(f"it has no GGUF file {echo(repository.tag)}, only {', '.join(tags)}{hint}")
    if tags:
        raise StartupError(f"it has {len(tags)} GGUF models: {', '.join(tags)}; name one: {repository.name}:{tags[0]}")
    if repository.tag:
        raise StartupError(f"it has no GGUF files; leave :{repository.tag} out")
    if any(name.endswith(PICKLES) for name in names):
        raise StartupError("it has only pickled weights, which can run code; ask for safetensors or GGUF")
    raise StartupError("it has neither safetensors nor GGUF files")


def _fetched(repository: Repository, names: list[str]) -> list[str]:
    """Returns the names of a model's files without the mmproj file if it would be of no use, which the log says."""
    useless = list(filter(ggufs.is_projector, names)) if repository.why_blind else []
    for name in useless:
        log.warning(
            "%s takes text only here: %s. Its mmproj file %s is not fetched; after a fix, run tureen pull %s",
            repository.text, repository.why_blind, name, repository.text,
        )  # fmt: skip
    return [name for name in names if name not in useless]


def _fetch_all(
    repository: Repository, commit: str, files: dict[str, dict[str, Any]], home: Path, progress: Progress
) -> None:
    """Fetches the blobs that are missing, and links them into the snapshot."""
    remotes = {name: _remote(repository, commit, name, file) for name, file in files.items()}
    total = sum(remote.size or 0 for remote in remotes.values())
    done = 0

    def received(num_bytes: int) -> None:
        progress(_phase(repository), done + num_bytes, total)

    for name, remote in remotes.items():
        blob = home / "blobs" / remote.digest.partition(":")[2]
        if not blob.exists():
            fetch(remote, blob, received)
        done += remote.size or 0
        _link(blob, home / "snapshots" / commit / name)
    progress(_phase(repository), total or 1, total or 1)
    reference = home / "refs" / repository.revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    if reference.name != commit:
        reference.write_text(commit, encoding="utf-8")


def _phase(repository: Repository) -> str:
    return f"download {repository.text}{BYTES}"


def _remote(repository: Repository, commit: str, name: str, file: dict[str, Any]) -> RemoteFile:
    """Raises Unreachable where the hub's words about a file are none: they become names of files."""
    stored = file.get("lfs") or {}
    kind, digest = ("sha256", stored.get("sha256")) if stored else ("git", file.get("blobId"))
    size = stored.get("size", file.get("size"))
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest) or not isinstance(size, int):
        raise Unreachable(f"{endpoint()} does not say size and digest of {echo(name)}")
    url = f"{endpoint()}/{repository.name}/resolve/{commit}/{quote(name)}"
    return RemoteFile(url, size, f"{kind}:{digest}", _headers())


def _link(blob: Path, place: Path) -> None:
    """Makes the file in the snapshot: a link to the blob, where the disk can do that; else a copy."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_file():
        return
    place.unlink(missing_ok=True)
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except (OSError, NotImplementedError):
        shutil.copyfile(blob, place)


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def _token() -> str:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return os.environ[name].strip()
    path = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser()
    try:
        return read_regular(path).decode().strip()
    except (OSError, ValueError):
        return ""


def _headers() -> dict[str, str]:
    token = _token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _refused(repository: Repository, fault: HttpFault | Unreachable) -> StartupError:
    if isinstance(fault, Unreachable):
        return _unreachable(repository, str(fault))
    page = f"{endpoint()}/{repository.name}"
    if fault.status == 403 or fault.code == "GatedRepo":
        has = "the account of your token (HF_TOKEN) has no access" if _token() else "no token was sent"
        why = f"it is gated, and {has}: accept its terms at {page}, then set HF_TOKEN to a token of that account"
    elif fault.code == "RevisionNotFound":
        why = f"it has no revision {echo(repository.revision)}; see {page}/tree/main"
    elif fault.status == 401 and _token():
        why = (
            f"the hub rejects your token (HF_TOKEN), or the token has no access to this repository; check both: {page}"
        )
    elif fault.status in (401, 404):
        why = "the hub has no such public repository; check the name, and for a private or gated model set HF_TOKEN"
    elif fault.status == 407:
        why = "the proxy needs a password: HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
    elif fault.status in BUSY:
        why = f"{fault}: it is busy; try again later, or set HF_ENDPOINT to a mirror"
    else:
        why = f"{fault}; check the name, and HF_ENDPOINT if it is set"
    return StartupError(f"model {repository.text}: {why}")


def _unreachable(repository: Repository, why: str) -> StartupError:
    return StartupError(
        f"model {repository.text}: no such folder here, not in the local caches, and {why}; download it elsewhere "
        f"(hf download {repository.name}) and pass the folder by --model-path, or set HF_ENDPOINT to a mirror"
    )
