"""Reads an embedding model's settings beside config.json, from the files of sentence-transformers. No torch.

modules.json lists the stages that a text passes: Transformer, Pooling, Normalize; a stage's settings stand in the
config.json of its folder. sentence_bert_config.json has the length that the model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tureen.contract.types import Pooling
from tureen.errors import StartupError, echo
from tureen.files import read_regular

STAGES: Final = ("Transformer", "Pooling", "Normalize")
POOLINGS: Final[dict[str, Pooling]] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


class SentenceConfig(msgspec.Struct, frozen=True):
    """How an embedding model turns a text into one vector."""

    pooling: Pooling = "mean"  # of the tokens' vectors, or the first token's
    max_tokens: int | None = None  # with those that the tokenizer adds; None: as many as there are positions


def read_sentence_config(folder: Path) -> SentenceConfig:
    """Reads the settings; without modules.json it is mean pooling, as in sentence-transformers.

    Raises StartupError naming the file.
    """
    modules = _read(folder / "modules.json")
    pooling: Pooling = "mean"
    for stage in modules if isinstance(modules, list) else []:
        kind = str(stage.get("type")).rsplit(".", 1)[-1] if isinstance(stage, dict) else ""
        if kind not in STAGES:
            raise StartupError(
                f"model {folder / 'modules.json'}: a stage of type {echo(kind)} is not supported; "
                f"known: {', '.join(STAGES)}"
            )
        if kind == "Pooling":
            pooling = _pooling(folder / Path(str(stage.get("path"))).name / "config.json")
    settings = _read(folder / "sentence_bert_config.json")
    max_tokens = settings.get("max_seq_length") if isinstance(settings, dict) else None
    return SentenceConfig(pooling, max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else None)


def embedding_sizes(hf: Mapping[str, Any], hidden_size: int) -> tuple[int, ...]:
    """Returns the sizes to which an embedding may be cut (arXiv:2205.13147); config.json says it by vLLM's names. () =
    none."""
    sizes = hf.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        return tuple(size for size in sizes if isinstance(size, int) and 1 <= size <= hidden_size)
    return tuple(range(1, hidden_size + 1)) if hf.get("is_matryoshka") is True else ()


def _pooling(file: Path) -> Pooling:
    settings = _read(file)
    known: dict[str, Any] = settings if isinstance(settings, dict) else {}
    modes = [name for name, value in known.items() if name.startswith("pooling_mode_") and value is True]
    if known.get("pooling_mode") is not None:  # newer files name the one
        modes = [f"pooling_mode_{known['pooling_mode']}_token{'' if known['pooling_mode'] == 'cls' else 's'}"]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise StartupError(
            f"model {file}: it asks for {echo(', '.join(modes) or 'no pooling')}; one of {', '.join(POOLINGS)} can be "
            "served"
        )
    return POOLINGS[modes[0]]


def _read(file: Path) -> Any:
    """Reads a JSON file; None where there is no such file."""
    try:
        return json.loads(read_regular(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartupError(f"model {file}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StartupError(f"model {file}: not valid JSON; download the model again") from None
