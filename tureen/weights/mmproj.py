"""Finds the mmproj file of a GGUF model, the vision encoder, and describes both files together as config.json does."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tureen.config import Config
from tureen.errors import StartupError, echo
from tureen.fetching import ggufs
from tureen.fetching.ggufs import Companion
from tureen.weights.gguf import GgufFile
from tureen.weights.gguf_config import PROJECTOR as ARCHITECTURE
from tureen.weights.gguf_config import TOKENS, gguf_config
from tureen.weights.gguf_facts import GgufFacts
from tureen.weights.gguf_parts import open_gguf
from tureen.weights.gguf_quants import dequantize
from tureen.weights.gguf_widen import WIDENED
from tureen.weights.projectors import PROJECTORS, ProjectorKind

EMBEDDINGS: Final = "token_embd.weight"
SIMILAR: Final = 0.9
"""The least cosine of an embedding and the same one in a type of few bits."""
WAY_OUT: Final = "or serve text alone with --language-model-only"
HARMLESS: Final = frozenset((
    "has_llava_projector", "has_qwen2vl_merger",  # projector_type says it
    "has_text_encoder",  # of CLIP, and always false
    "vision.feed_forward_length",  # converters write 0 or another size for some Qwens: the tensors have the size
))  # fmt: skip
"""Keys that change nothing."""
SOUNDS: Final = ("audio.", "has_audio_encoder")
"""Beginnings of keys about an audio encoder, which is left out."""


def find_mmproj(model: Path, config: Config) -> Companion:
    """Returns the mmproj file of a GGUF model: that of --mmproj, or the only one next to the model that belongs to it.

    Raises StartupError for a file that does not belong to the model if --mmproj names it, or that cannot be read.
    """
    if config.language_model_only:
        return Companion()
    if config.mmproj is not None:
        path = Path(config.mmproj).expanduser()
        text, facts = GgufFacts(open_gguf(model)), _opened(path)
        if why := why_foreign(text, facts):
            fix = f"give the file that was made from the same model, {WAY_OUT}"
            raise StartupError(f"--mmproj {path}: {why}; {fix}", field="mmproj")
        doubt = _doubt(text, facts)
        return Companion(path, doubt, is_warning=bool(doubt))
    near = ggufs.projectors_next_to(model)
    if not near:
        return Companion()
    text = GgufFacts(open_gguf(model))
    if not any(text.architecture in kind.architectures for kind in PROJECTORS.values()):
        return Companion()
    if len(near) == 1:
        return _neighbour(text, near[0])
    names = ", ".join(path.name for path in near)
    choice = f"choose one with --mmproj {near[0]}"
    note = f"{model.name} takes text only: several mmproj files are next to it ({names}); {choice}"
    return Companion(note=note, is_warning=True)


def _neighbour(text: GgufFacts, path: Path) -> Companion:
    """Returns the only mmproj file next to a model, if it can be used: a folder of downloads must not stop a model that
    takes text."""
    name = text.file.path.name
    try:
        facts = _opened(path)
        why = why_foreign(text, facts)
        if not why:
            describe(gguf_config(text.file), text.file, facts.file)
    except StartupError as error:
        why = error.message
    if why:
        return Companion(note=f"{path.name} is not used with {name}: {why}", is_warning=True)
    doubt = _doubt(text, facts)
    note = f"{name} takes pictures with {path.name}, which is next to it"
    return Companion(path, f"{note}; {doubt}" if doubt else note, is_warning=bool(doubt))


def _doubt(text: GgufFacts, facts: GgufFacts) -> str:
    """Returns that two files name different models; "" if they do not, or one names none."""
    names = [file.metadata.get("general.basename") for file in (text.file, facts.file)]
    own, other = (set(re.findall(r"[a-z0-9.]+", name.lower() if isinstance(name, str) else "")) for name in names)
    if not own or not other or own <= other or other <= own:
        return ""
    both = " and ".join(map(echo, names))
    return f"the files name different models, {both}: answers about pictures may be wrong"


def _opened(path: Path) -> GgufFacts:
    """Raises StartupError."""
    try:
        return GgufFacts(open_gguf(path))
    except StartupError as error:
        raise StartupError(f"{error.message.replace('model ', 'mmproj file ', 1)}, {WAY_OUT}", field="mmproj") from None


def why_foreign(text: GgufFacts, facts: GgufFacts) -> str:
    """Returns why an mmproj file does not go with a model; "" if it does, as far as their metadata tell."""
    if facts.architecture != ARCHITECTURE:
        return f"its general.architecture is {echo(facts.architecture)}, not {ARCHITECTURE}: it is not an mmproj file"
    name = _type_of(facts)
    projector = PROJECTORS.get(name) if isinstance(name, str) else None
    if projector is None:
        return f"clip.projector_type {echo(name)} is not supported; these are: {', '.join(PROJECTORS)}"
    if text.architecture not in projector.architectures:
        return (
            f"clip.projector_type {name} is for models of the architecture "
            f"{' or '.join(projector.architectures)}, and the model's is {text.architecture}"
        )
    width, expected = _width(facts, projector), text.get("embedding_length")
    if width != expected:
        what = f"the width of {projector.width_of}," if projector.width_of else "clip.vision.projection_dim"
        return f"{what} {echo(width)} is not the model's {text.architecture}.embedding_length, {echo(expected)}"
    tokens = _tokens(text.file)
    if projector.placeholder not in tokens and not projector.may_lack_token:
        return f"the model's {TOKENS} has no {projector.placeholder}, which stands for a picture"
    for tensor, token in projector.unused.items():
        if (
            tensor in facts.file.tensors
            and token in tokens
            and not _is_row(facts.file, tensor, text.file, tokens.index(token))
        ):
            return f"tensor '{tensor}' is not the model's embedding of {token}"
    return ""


def _width(facts: GgufFacts, projector: ProjectorKind) -> object:
    """Returns the width of the embeddings; None if the file lacks it."""
    if not projector.width_of:
        return facts.get("vision.projection_dim")
    tensor = facts.file.tensors.get(projector.width_of)
    return None if tensor is None or not tensor.shape else tensor.shape[0]


def _is_row(file: GgufFile, name: str, model: GgufFile, index: int) -> bool:
    """Returns whether a tensor is about a row of the model's embeddings; True if their type is not read."""
    table, own = model.tensors.get(EMBEDDINGS), file.tensors[name]
    if table is None or len(table.shape) != 2 or index >= table.shape[0] or math.prod(own.shape) != table.shape[1]:
        return False
    if table.encoding.name in WIDENED or own.encoding.name in WIDENED:
        return True
    size = table.num_bytes // table.shape[0]
    row, other = np.empty((2, table.shape[1]), np.float32)
    dequantize(model.raw(table)[index * size :][:size], table.encoding, row)
    dequantize(file.raw(own), own.encoding, other)
    return bool(row @ other > SIMILAR * np.linalg.norm(row) * np.linalg.norm(other))


def _tokens(model: GgufFile) -> list[str]:
    tokens = model.metadata.get(TOKENS)
    return tokens if isinstance(tokens, list) else []


def projector_of(facts: GgufFacts) -> ProjectorKind:
    """Returns the kind of projector of a file that goes with its model, see `why_foreign`."""
    return PROJECTORS[str(_type_of(facts))]


def _type_of(facts: GgufFacts) -> object:
    """Returns the name of the projector, which files with an audio encoder have under another key."""
    named = facts.get("projector_type") or facts.get("vision.projector_type")
    return named or ("mlp" if facts.get("has_llava_projector") is True else None)  # the oldest files name none


class PairConfigs(NamedTuple):
    """config.json and preprocessor_config.json of a model in two files."""

    config: dict[str, Any]
    preprocessor: dict[str, Any]


def describe(text_config: dict[str, Any], model: GgufFile, mmproj: GgufFile) -> PairConfigs:
    """Returns what config.json and preprocessor_config.json of the original model say. text_config: of the GGUF file
    with the language model.

    Raises StartupError naming the key of the mmproj file that is missing, wrong or not supported.
    """
    try:
        return _described(text_config, GgufFacts(model), GgufFacts(mmproj))
    except StartupError as error:
        raise StartupError(f"{error.message}, {WAY_OUT}", field="mmproj") from None


def _described(text_config: dict[str, Any], text: GgufFacts, facts: GgufFacts) -> PairConfigs:
    mmproj = facts.file
    if mmproj.unreadable:
        raise facts.fault(f"{mmproj.unreadable}; take the model's F16 mmproj file")
    if why := why_foreign(text, facts):
        raise facts.fault(why)
    projector = projector_of(facts)
    if facts.get("has_vision_encoder") is not True:
        raise facts.fault("clip.has_vision_encoder must be true: the file has no vision encoder")
    if not projector.may_hear:
        facts.refuse("has_audio_encoder", "an audio encoder")
    inner = {key: value for key, value in text_config.items() if key not in ("architectures", "vision_config")}
    own, preprocessor = projector.read(facts, text, inner)
    tokens = _tokens(text.file)
    preprocessor |= {"image_mean": _channels(facts, "image_mean"), "image_std": _channels(facts, "image_std")}
    if min(preprocessor["image_std"]) <= 0:
        raise facts.fault("clip.vision.image_std must be numbers above 0")
    facts.refuse_others(harmless=HARMLESS, skipped=SOUNDS if projector.may_hear else ())
    return PairConfigs(
        {
            "text_config": inner,
            "tie_word_embeddings": text_config["tie_word_embeddings"],
            "bos_token_id": text_config["bos_token_id"],
            "eos_token_id": text_config["eos_token_id"],
            projector.placeholder_key: tokens.index(projector.placeholder) if projector.placeholder in tokens else None,
            **own,
        },
        preprocessor,
    )


def _channels(facts: GgufFacts, key: str) -> list[float]:
    """Returns a number for each of R, G and B."""
    value = facts.stored(f"vision.{key}")
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.shape != (3,):
        raise facts.fault(f"clip.vision.{key} must be three numbers, got {echo(value)}")
    if not np.isfinite(value).all():
        raise facts.fault(f"clip.vision.{key} must be finite numbers, got {echo(value.tolist())}")
    return [float(str(number)) for number in value]
