"""Weights of a Hugging Face folder: one safetensors file, or several with an index. Pickled files are never opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from tureen.errors import StartupError, echo

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


def folder_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by name, mapped from its file. Raises StartupError naming the file that is missing or corrupt."""
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    yield name, opened.get_tensor(name)
        except FileNotFoundError:
            raise StartupError(f"model {file}: there is no such file; download the model again") from None
        except OSError as error:
            raise StartupError(f"model {file}: cannot read it: {error}") from None
        except SafetensorError as error:
            raise StartupError(f"model {file}: corrupt: {echo(str(error))}; download the model again") from None


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / name for name in _indexed(folder / INDEX)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(
            f"model {folder}: has no *.safetensors; download the model again, or convert it to safetensors"
        )
    return files


def _indexed(index: Path) -> list[str]:
    try:
        names = list(dict.fromkeys(json.loads(index.read_bytes())["weight_map"].values()))
    except OSError as error:
        raise StartupError(f"model {index}: cannot read it: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StartupError(f"model {index}: corrupt; download the model again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise StartupError(f"model {index}: names a file outside the folder: {echo(name)}")
    return names
