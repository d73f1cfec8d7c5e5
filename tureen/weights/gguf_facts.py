"""Reads and checks what a GGUF file's metadata say of its architecture."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tureen.errors import StartupError, echo
from tureen.weights.gguf import GgufFile

HARMLESS: Final = frozenset((
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",  # a family reads one of the two
    "expert_used_count",  # files of models without experts may have it
    "leading_dense_block_count",
    "pooling_type",  # read for embeddings
    "rope.scaling.finetuned",  # Granite reads it
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "token_type_count",
    "vocab_size",
))  # fmt: skip
"""Keys that change no value of a model that does not read them."""
ONES: Final = frozenset(
    f"rope.scaling.{key}" for key in ("attn_factor", "mscale", "yarn_ext_factor", "yarn_attn_factor")
)
"""Keys of factors, which change nothing if they are 1."""
MOST: Final = {"block_count": 4096, "expert_count": 4096, "vision.block_count": 4096}
"""The largest accepted counts. Memory grows with these before any tensor is compared."""
OF_PICTURES: Final = ("mm.", "vision.")
"""Beginnings of keys about pictures, which a text model does not get."""


class GgufFacts:
    """The metadata under the architecture's own prefix, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self.fault("general.architecture is missing in its metadata")
        self.architecture = architecture
        self._read: set[str] = set()

    def stored(self, key: str) -> object:
        """Returns the value as the file has it; None without one."""
        self._read.add(key)
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def get(self, key: str) -> object:
        value = self.stored(key)
        if isinstance(value, np.ndarray):  # one number a layer
            if value.size == 0 or (value != value[0]).any():
                raise self.unsupported(f"{self.architecture}.{key} differs from layer to layer, which is not supported")
            return value[0].item()
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            raise self.fault(f"{self.architecture}.{key} must be a positive integer, got {echo(value)}")
        if value > MOST.get(key, value):
            raise self.fault(f"{self.architecture}.{key} must be at most {MOST[key]}, got {value}")
        return value

    def one_count(self, key: str, default: int | None = None) -> int:
        """Returns a count like `count`, or the one that some layers have while the others have 0."""
        value = self.stored(key)
        if not isinstance(value, np.ndarray):
            return self.count(key, default)
        counts = np.unique(value[value != 0])
        if value.dtype.kind not in "iu" or len(counts) != 1 or not 1 <= counts[0] < 1 << 31:
            raise self.fault(f"{self.architecture}.{key} must have one positive integer, or 0, for each layer")
        return int(counts[0])

    def counts(self, key: str, layers: int) -> list[int]:
        """Returns one count per layer. A single number in the file counts for every layer."""
        value = self.stored(key)
        if not isinstance(value, np.ndarray):
            return [self.count(key)] * layers
        if value.dtype.kind not in "iu" or len(value) < layers or ((value < 1) | (value >= 1 << 31)).any():
            raise self.fault(f"{self.architecture}.{key} must have a positive integer for each of {layers} layers")
        return [int(count) for count in value[:layers]]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.fault(f"{self.architecture}.{key} must be a positive number, got {echo(value)}")
        return float(value)

    def optional_count(self, key: str) -> int | None:
        """Returns a count; None if the key is missing or 0."""
        return self.count(key) if self.get(key) else None

    def factor(self, key: str, default: float) -> float:
        """Returns a positive number; the default if the key is missing or 0, as in llama.cpp."""
        return self.number(key) if self.get(key) else default

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Returns one flag a layer; None if the key is missing or one number for all layers."""
        value = self.stored(key)
        if not isinstance(value, np.ndarray):
            return None
        if len(value) < count or not np.isin(value, (0, 1)).all():
            raise self.fault(f"{self.architecture}.{key} must have a flag for each of {count} layers")
        return [bool(flag) for flag in value[:count]]

    def are_set(self, key: str, layers: int) -> list[bool]:
        """Returns for each layer whether its count is not 0. Raises StartupError if a layer has no count."""
        counts = self.stored(key)
        if not isinstance(counts, np.ndarray) or len(counts) < layers:
            raise self.fault(f"{self.architecture}.{key} must have a number for each of {layers} layers")
        return [bool(count) for count in counts[:layers]]

    def refuse(self, key: str, what: str) -> None:
        """Raises StartupError if the key is there and neither 0 nor false."""
        if self.get(key):
            raise self.fault(f"{what} ({self.architecture}.{key}) is not supported")

    def refuse_others(self, harmless: frozenset[str] = HARMLESS, skipped: tuple[str, ...] = OF_PICTURES) -> None:
        """Raises StartupError for a key of this architecture that no reader has used, unless it is harmless, 0 or
        empty. skipped: beginnings of keys that are not looked at."""
        prefix = f"{self.architecture}."
        for name in self.file.metadata:
            key = name.removeprefix(prefix)
            value = self.file.metadata[name]
            if not name.startswith(prefix) or key in self._read or key in harmless or key.startswith(skipped):
                continue
            if key in ONES and value == 1:
                continue
            if np.any(value) if isinstance(value, np.ndarray) else value:
                raise self.fault(
                    f"{name} is unknown and may change what the model computes; got {echo(value)}; take a file "
                    "that llama.cpp's convert_hf_to_gguf.py made, or the model's safetensors"
                )

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def has_any(self, *ends: str) -> bool:
        """Returns whether any tensor's name has one of these ends."""
        return any(name.endswith(ends) for name in self.file.tensors)

    def unsupported(self, message: str) -> StartupError:
        """Returns the error for something that is supported in safetensors, or may be."""
        return self.fault(f"{message}; take the model's safetensors")

    def fault(self, message: str) -> StartupError:
        return StartupError(f"model {self.file.path}: {message}")
