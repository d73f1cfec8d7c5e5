"""Opens a model on disk, and finds one by its name: its config, its tokenizer. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from tureen.config import Config
from tureen.errors import StartupError, echo
from tureen.fetching import ggufs
from tureen.fetching.ggufs import Companion
from tureen.fetching.names import WHAT_IS_TAKEN
from tureen.fetching.on_disk import name_of
from tureen.fetching.pull import pull
from tureen.fetching.shelf import recommended_sampling
from tureen.files import read_regular, sample_digest
from tureen.log import Progress, no_progress
from tureen.text import tokenizer
from tureen.text.tokenizer import Tokenizer
from tureen.weights import llava_original
from tureen.weights.gguf import GgufFile
from tureen.weights.gguf_config import gguf_config, gguf_pooling
from tureen.weights.gguf_parts import open_gguf
from tureen.weights.sentence_files import SentenceConfig, read_sentence_config

if TYPE_CHECKING:
    from tureen.weights.mmproj import PairConfigs

WEIGHTS: Final = (".safetensors", ".gguf")
PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
HEADLESS: Final = ("Model", "ForSequenceClassification")
"""Ends of the names of architectures that give no probabilities of tokens."""
GENERATION_DEFAULTS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
GGUF_SAMPLING: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Keys of a GGUF file's metadata -> sampling parameters."""


class ModelSource(msgspec.Struct, frozen=True, dict=True):
    """A model on disk. `path` is the GGUF file, or the folder with safetensors, config.json and tokenizer.json.

    Where the folder's config.json names a `gguf_file` in its text_config, that file beside it holds the language model
    and the tokenizer, and safetensors the rest. `mmproj`: of a GGUF model, the file with the vision encoder.
    """

    name: str
    path: Path
    format: Literal["gguf", "safetensors"]
    mmproj: Companion = Companion()

    @property
    def files(self) -> list[Path]:
        """Returns the files of the model, those of its folder sorted. Raises OSError."""
        if self.path.is_dir():
            return sorted(path for path in self.path.iterdir() if path.is_file())
        parts = [self.path.with_name(name) for name in ggufs.parts(self.path.name)]
        return parts if self.mmproj.path is None else [*parts, self.mmproj.path]

    @cached_property
    def gguf(self) -> GgufFile | None:
        """Returns the GGUF file with the language model, opened when first asked for; None where safetensors hold that.

        Raises StartupError naming the file and the fault.
        """
        if self.format == "gguf":
            return open_gguf(self.path)
        config = self.path / "config.json"
        text = _json_object(config).get("text_config")
        name = text.get("gguf_file") if isinstance(text, dict) else None
        if name is None:
            return None
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise StartupError(f"model {config}: gguf_file must name a file of that folder, got {echo(name)}")
        return open_gguf(self.path / name)

    @cached_property
    def projector(self) -> GgufFile | None:
        """Returns the GGUF file with the vision encoder, opened when first asked for; None if safetensors have that, or
        the model takes text only. Raises StartupError."""
        return None if self.mmproj.path is None else open_gguf(self.mmproj.path)

    @cached_property
    def pair(self) -> PairConfigs | None:
        """Returns the description of a model in two GGUF files; None for other models. Raises StartupError."""
        if self.projector is None or self.gguf is None or self.gguf_config is None:
            return None
        from tureen.weights.mmproj import describe  # noqa: PLC0415 - most models are in one file

        return describe(self.gguf_config, self.gguf, self.projector)

    @cached_property
    def sentence(self) -> SentenceConfig:
        """Returns the settings of an embedding model or a reranker, read once. Raises StartupError."""
        if self.format == "gguf":
            assert self.gguf is not None
            return SentenceConfig(gguf_pooling(self.gguf))
        return read_sentence_config(self.path)

    @cached_property
    def gguf_config(self) -> dict[str, Any] | None:
        """Returns config.json as it would describe the GGUF file's language model, read once; None without one. Raises
        StartupError."""
        if self.gguf is None:
            return None
        with _naming(self.gguf.path):
            return gguf_config(self.gguf)


def resolve_model(
    model: str, *, cache_dir: Path, revision: str | None = None, progress: Progress = no_progress
) -> ModelSource:
    """Finds the model, fetching it into `cache_dir` first if it must be. Raises StartupError with the fix."""
    return open_model(pull(model, Config(download_dir=str(cache_dir), revision=revision), progress))


def open_model(path: Path, config: Config | None = None) -> ModelSource:
    """Returns the model at a path that `pull` returned. Raises StartupError if it cannot be read.

    config: the settings that say where models are kept, which tells a model's name, and which mmproj file goes with a
    GGUF model; without them none does, and the name is that of the file or folder.
    """
    snapshots = path.parent
    is_snapshot = path.is_dir() and snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    # the folder's own name is a commit
    source = _folder(path, snapshots.parent.name.split("--")[-1]) if is_snapshot else _local(path)
    if config is None:
        return source
    source = replace(source, name=name_of(path, config))
    if source.format != "gguf":
        if config.mmproj is not None:
            raise StartupError(
                f"--mmproj {config.mmproj}: is for GGUF models only, and {path} has safetensors, which include the "
                "vision encoder; leave it out",
                field="mmproj",
            )
        return source
    if config.mmproj is None and not ggufs.projectors_next_to(source.path):
        return source
    from tureen.weights.mmproj import find_mmproj  # noqa: PLC0415 - most models are in one file

    return replace(source, mmproj=find_mmproj(source.path, config))


def _local(path: Path) -> ModelSource:
    if path.is_dir():
        return _folder(path, None)
    if path.suffix == ".gguf":
        return ModelSource(ggufs.stem(path.name), path, "gguf")
    if path.suffix in PICKLES:
        raise StartupError(f"model {path}: pickled weights can run code and are not read; convert them to safetensors")
    raise StartupError(f"model {path}: not a model; give {WHAT_IS_TAKEN}")


def _folder(path: Path, name: str | None) -> ModelSource:
    try:
        files = os.listdir(path)
    except OSError as error:
        raise StartupError(f"model {path}: cannot read the folder: {error.strerror}") from None
    name = name or path.resolve().name
    has_safetensors = any(file.endswith(".safetensors") for file in files)
    if not has_safetensors and any(file.endswith(PICKLES) for file in files):
        raise StartupError(f"model {path}: has only pickled weights, which can run code; convert them to safetensors")
    if "config.json" in files:
        return ModelSource(name, path, "safetensors")
    models = list(ggufs.groups(files).values())
    if len(models) == 1:
        return ModelSource(name, path / models[0][0], "gguf")
    if models:
        raise StartupError(f"model {path}: holds {len(models)} GGUF files; name one, such as {path / models[0][0]}")
    raise StartupError(
        f"model {path}: has no config.json; a model folder needs config.json, safetensors, tokenizer.json"
    )


def generation_defaults(source: ModelSource) -> dict[str, int | float]:
    """Returns the sampling parameters that the model's makers recommend.

    They stand in generation_config.json. Of a GGUF file they stand in its metadata, as llama.cpp's converter writes
    them, or else on the shelf of known models. A temperature of 0 is greedy; 0 of anything else means that it is off.
    Raises StartupError naming the file where one is not a number.
    """
    path = source.path / "generation_config.json"
    if source.format == "safetensors" and path.exists():
        recommended = {name: value for name, value in _json_object(path).items() if name in GENERATION_DEFAULTS}
    elif source.gguf is not None:
        path, metadata = source.gguf.path, source.gguf.metadata
        of_file = {name: metadata[key] for key, name in GGUF_SAMPLING.items() if key in metadata}
        recommended = of_file or dict(recommended_sampling(metadata))
    else:
        return {}
    defaults = {name: value for name, value in recommended.items() if value or _is_greedy(name, value)}
    wrong = [name for name, value in defaults.items() if not _is_number(value)]
    if wrong:
        raise StartupError(f"{path}: {wrong[0]} must be a number of at most 64 bits, got {echo(defaults[wrong[0]])}")
    return defaults


def _is_number(value: object) -> bool:
    """Return whether a value is a number that an engine can send to another process."""
    if isinstance(value, int) and not isinstance(value, bool):
        return -(2**63) <= value < 2**63
    return isinstance(value, float)


def _is_greedy(name: str, value: object) -> bool:
    return name == "temperature" and value is not None and value is not False


def model_config(source: ModelSource) -> dict[str, Any]:
    """Returns the model's config.json, or its equivalent from GGUF metadata; `eos_token_id` is a list of all end
    tokens.

    Raises StartupError naming the file and what is wrong or not supported.
    """
    text = source.gguf_config
    if text is not None:
        if source.format == "gguf":
            return dict(text if source.pair is None else source.pair.config)
        return {**_json_object(source.path / "config.json"), "text_config": text, "eos_token_id": text["eos_token_id"]}
    config = llava_original.translated(_json_object(source.path / "config.json"))
    generation = source.path / "generation_config.json"
    ends = tokenizer.id_list(config.get("eos_token_id"))
    if generation.exists():
        ends += tokenizer.id_list(_json_object(generation).get("eos_token_id"))
    names = config.get("architectures")
    is_headless = isinstance(names, list) and bool(names) and str(names[0]).endswith(HEADLESS)
    if is_headless or source.sentence.pooling is not None:
        config = {**config, "tie_word_embeddings": True}  # no head for logits is needed
    return {**config, "eos_token_id": sorted(set(ends))}


def preprocessor_config(source: ModelSource) -> dict[str, Any]:
    """Returns preprocessor_config.json, or its equivalent; {} where the model has none.

    Raises StartupError naming the file and what is wrong.
    """
    if source.format == "gguf":
        return {} if source.pair is None else source.pair.preprocessor
    path = source.path / "preprocessor_config.json"
    if path.exists():
        return _json_object(path)
    newer = source.path / "processor_config.json"
    settings = _json_object(newer).get("image_processor") if newer.exists() else None
    return settings if isinstance(settings, dict) else llava_original.preprocessor(model_config(source))


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(file))
    except OSError as error:
        raise StartupError(f"model {file}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StartupError(f"model {file}: not valid JSON; download the model again") from None
    if not isinstance(value, dict):
        raise StartupError(f"model {file}: must hold a JSON object; download the model again")
    return value


def load_tokenizer(source: ModelSource, tokenizer_path: str | None = None) -> Tokenizer:
    """Loads the model's own tokenizer, or that at `tokenizer_path` (a folder or a tokenizer.json). Raises
    StartupError."""
    if tokenizer_path is not None:
        path = Path(tokenizer_path).expanduser()
        if not path.exists():
            raise StartupError(f"--tokenizer-path {echo(tokenizer_path)}: there is no such file or folder")
        return tokenizer.from_folder(path)
    if source.gguf is None:
        return tokenizer.from_folder(source.path)
    with _naming(source.gguf.path):
        return tokenizer.from_gguf_metadata(dict(source.gguf.metadata))  # each array of strings is read once


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Faults found in the file's contents name it."""
    try:
        yield
    except StartupError as error:
        if str(path) in error.message:
            raise
        raise StartupError(f"model {path}: {error.message}") from None


def weights_digest(source: ModelSource) -> str:
    """Returns the digest of a model's config.json and of samples of its weights. Raises OSError."""
    digest = hashlib.sha256()
    for file in source.files:
        if file.suffix in WEIGHTS or file.name == "config.json":
            digest.update(sample_digest(file))
    return digest.hexdigest()[:16]
