"""Weights that arrive in parts, and the folder that they make a model of. No torch.

Each part is a safetensors file. It is checked against the model that is served before it counts: names, shapes, types.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import InvalidRequest, StartupError, echo
from tureen.runner import loading
from tureen.temporary_folder import TemporaryFolder
from tureen.weights.mapped import FETCH_AGAIN
from tureen.weights.modules import FLOATS
from tureen.weights.safetensors import BITS, INDEX, LENGTH, SafetensorsFile, indexed, weight_files
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import UNREAD, Stored, local_name

PREFIX: Final = "received-"
HEADER_BYTES: Final = 1024
"""Most bytes of a header for each weight of the model: its JSON is parsed with the interpreter held."""
SPARE_NAMES: Final = 64
NAMED: Final = 3
"""Weights that a message names."""
FLOAT32_BYTES: Final = 4
QUANTISED: Final = ("quantization_config", "compression_config")


class Announced(NamedTuple):
    """A tensor, before or without its bytes."""

    name: str  # as its sender calls it
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


class ReceivedWeights:
    """The weights of one update, in a folder of their own. Nothing that is served changes before `source` is used."""

    def __init__(self, base: ModelSource) -> None:
        """base: the model that is served. Raises StartupError, OSError."""
        self._hf = model_config(base)
        self._model = loading.describe(self._hf)
        self._shapes = self._model.weights()
        self._arrived: set[str] = set()  # as `ModelConfig.weights` calls them
        self._files: dict[str, str] = {}  # sender's name -> file
        self._num_parts = 0
        self._lock = threading.Lock()
        self.num_bytes = 0  # of the parts that have arrived
        self.num_arriving = 0  # parts that are being sent
        self.num_arriving_bytes = 0  # of those
        self.folder = TemporaryFolder("weights")

    @property
    def missing(self) -> list[str]:
        """The weights that have not arrived."""
        return [name for name in self._shapes if name not in self._arrived]

    @property
    def max_header_bytes(self) -> int:
        return HEADER_BYTES * (len(self._shapes) + SPARE_NAMES)

    @property
    def max_bytes(self) -> int:
        """Most bytes of all parts: every weight as float32, the head for logits even if it is tied, and headers."""
        head = self._model.vocab_size * self._model.hidden_size
        numbers = head + sum(math.prod(shape) for shape in self._shapes.values())
        return FLOAT32_BYTES * numbers + self.max_header_bytes

    def new_part(self) -> Path:
        """Returns the path of the next part, for whoever writes it."""
        self._num_parts += 1
        return self.folder.path / f"{PREFIX}{self._num_parts:05}.safetensors"

    def check(self, tensors: Iterable[Announced]) -> None:
        """Checks tensors before their bytes arrive. Raises InvalidRequest."""
        names, num_bytes = set[str](), 0
        for tensor in tensors:
            _check_tensor(tensor)
            num_bytes += tensor.num_bytes
            self._check_room(num_bytes)
            self._note(tensor, partial(_zeros, tensor.num_bytes), names)

    def add(self, path: Path) -> int:
        """Takes a part that is written. Returns the number of its tensors. Raises InvalidRequest; then the part does
        not count, and its file is removed."""
        try:
            with self._lock:
                return self._add(path)
        except StartupError as error:
            fault = error.message.replace(f"model {path}: ", "").replace(f"; {FETCH_AGAIN}", "")
            path.unlink(missing_ok=True)
            raise InvalidRequest(f"the body is no safetensors file: {fault}", code="invalid_weights") from None
        except InvalidRequest:
            path.unlink(missing_ok=True)
            raise

    def source(self, base: ModelSource, *, is_partial: bool, is_dummy: bool) -> ModelSource:
        """Returns the model with the weights that arrived. base: the model that is served now. is_partial: weights that
        did not arrive are the base's. is_dummy: the base is served with random weights.

        Raises InvalidRequest naming weights that are missing, or that cannot be taken from the served model.
        """
        missing = self.missing
        if not self._arrived:
            raise InvalidRequest("no weights have arrived; nothing has changed", code="missing_weights")
        if missing and not is_partial:
            raise InvalidRequest(
                f"{len(missing)} of {len(self._shapes)} weights have not arrived: {_some(missing)}; nothing has "
                "changed. Send them, or set partial to keep their present values",
                code="missing_weights",
            )
        hf = model_config(base)
        if missing and (is_dummy or base.gguf is not None or any(hf.get(name) for name in QUANTISED)):
            raise self._not_kept()
        places = self._files | (self._base_places(base) if missing else {})
        config = {name: value for name, value in hf.items() if missing or name not in QUANTISED}
        folder = self.folder.path
        (folder / "config.json").write_text(json.dumps(config, default=_plain), encoding="utf-8")
        (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
        return ModelSource(base.name, folder, "safetensors")

    def close(self) -> None:
        """Removes the files."""
        self.folder.close()

    def _add(self, path: Path) -> int:
        with path.open("rb") as beginning:
            length = int.from_bytes(beginning.read(LENGTH), "little")
        if length > self.max_header_bytes:
            raise InvalidRequest(
                f"the body is no safetensors file of this model: its header would have {length} bytes, and at most "
                f"{self.max_header_bytes} are read. Pickles (torch.save) are not read; send what "
                "safetensors.torch.save returns",
                code="invalid_weights",
            )
        file = SafetensorsFile(path)
        self._check_room(path.stat().st_size)
        names = set[str]()
        for info in file.tensors.values():
            tensor = Announced(info.name, info.encoding.name, info.shape)
            _check_tensor(tensor)
            self._note(tensor, partial(file.raw, info), names)
        self._arrived |= names
        self.num_bytes += path.stat().st_size
        self._files.update(dict.fromkeys(file.tensors, path.name))
        return len(file.tensors)

    def _check_room(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"the weights of an update may have {self.max_bytes} bytes, as many as the model in float32; this part "
                f"makes them {self.num_bytes + num_bytes}",
                code="too_many_weights",
            )

    def _note(self, tensor: Announced, content: Callable[[], NDArray[np.uint8]], names: set[str]) -> None:
        """Adds the model's weights that a tensor has to `names`. Raises InvalidRequest naming a tensor that is unknown,
        misshapen, or here already."""
        for stored in self._stored(tensor, content):
            shape = self._shapes.get(stored.name)
            if shape is None and not loading.is_not_needed(stored, self._model):
                near = difflib.get_close_matches(stored.name[:256], self._shapes, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise InvalidRequest(
                    f"weight {echo(tensor.name)}: the model has no such weight{hint}", code="unknown_weight"
                )
            if shape is None:
                continue
            if not loading.is_same_shape(shape, stored.shape):
                raise InvalidRequest(
                    f"weight {echo(tensor.name)} has shape {list(stored.shape)}; the model that is served has "
                    f"{list(shape)}",
                    code="misshapen_weight",
                )
            if stored.name in names or stored.name in self._arrived:
                raise InvalidRequest(
                    f"weight {echo(tensor.name)} has arrived already in this update; send each once, or drop the "
                    "update by /abort_weight_update",
                    code="repeated_weight",
                )
            names.add(stored.name)

    def _stored(self, tensor: Announced, content: Callable[[], NDArray[np.uint8]]) -> Iterator[Stored]:
        """Yields a tensor as the model's weights. Raises InvalidRequest."""
        if tensor.name.startswith(UNREAD) or tensor.name.endswith("rotary_emb.inv_freq"):
            return
        stored = Stored(local_name(tensor.name), tensor.shape, tensor.dtype, content)
        named = loading.renamed([stored], self._hf, self._model)
        unread = loading.unread_parts(self._model)
        try:
            yield from loading.unstacked((each for each in named if not each.name.startswith(unread)), self._shapes)
        except StartupError as error:
            raise InvalidRequest(
                f"weight {echo(tensor.name)} does not fit the model that is served: {error.message}",
                code="misshapen_weight",
            ) from None

    def _not_kept(self) -> InvalidRequest:
        """Returns the error for weights that did not arrive and have no values in a file that could be kept."""
        missing = self.missing
        return InvalidRequest(
            f"{len(missing)} of {len(self._shapes)} weights have not arrived: {_some(missing)}. Their present values "
            "cannot be kept, because the model that is served is stored quantised or as GGUF, or has random weights "
            "(--load-format dummy). Begin an update (/begin_weight_update), send all weights, and end it "
            "(/end_weight_update)",
            code="missing_weights",
        )

    def _base_places(self, base: ModelSource) -> dict[str, str]:
        """Links to the base's files with weights that did not arrive. Returns the file of each of the base's tensors
        that no part has: for one that is replaced, a file that does not have it. Raises InvalidRequest."""
        present, places = indexed(base.path), dict[str, str]()
        arrived = next(iter(self._files.values()))
        for number, path in enumerate(weight_files(base.path), 1):
            file, link = SafetensorsFile(path), f"base-{number:05}.safetensors"
            own = [name for name in file.tensors if present.get(name, path.name) == path.name]
            kept = [name for name in own if not self._is_replaced(file, name)]
            places = dict.fromkeys(file.tensors.keys() - self._files.keys(), arrived) | places
            places |= dict.fromkeys(kept, link)
            if kept:
                _link(path, self.folder.path / link)
        return places

    def _is_replaced(self, file: SafetensorsFile, name: str) -> bool:
        """Returns whether the weights in a tensor of the base have arrived. Raises InvalidRequest if only some have."""
        info = file.tensors[name]
        tensor = Announced(name, info.encoding.name, info.shape)
        parts = {stored.name for stored in self._stored(tensor, partial(file.raw, info))}
        arrived = parts & self._arrived
        if arrived and arrived != parts:
            raise InvalidRequest(
                f"weights {_some(sorted(parts - arrived))} have not arrived, and the served model keeps them in one "
                f"tensor, {echo(name)}, with {_some(sorted(arrived))}; send these too",
                code="missing_weights",
            )
        return bool(arrived)


def _check_tensor(tensor: Announced) -> None:
    """Raises InvalidRequest for a tensor of a type that is not read, and for an empty one."""
    if 0 in tensor.shape:
        raise InvalidRequest(
            f"weight {echo(tensor.name)} has shape {list(tensor.shape)}, so it is empty", code="misshapen_weight"
        )
    if tensor.dtype not in FLOATS:
        raise InvalidRequest(
            f"weight {echo(tensor.name)} has type {tensor.dtype}; F32, F16 and BF16 are taken. Convert it",
            code="invalid_weights",
        )


def _zeros(num_bytes: int) -> NDArray[np.uint8]:
    return np.zeros(num_bytes, np.uint8)


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:NAMED])}{', …' if len(names) > NAMED else ''}"


def _link(target: Path, link: Path) -> None:
    """Links to a file that may not outlive this one, so that its bytes stay; to another file system by its name."""
    link.unlink(missing_ok=True)
    try:
        os.link(target.resolve(), link)
    except OSError:
        link.symlink_to(target.resolve())


def _plain(value: Any) -> Any:
    """Returns a value of a GGUF file's metadata that json does not know."""
    return value.tolist() if hasattr(value, "tolist") else list(value)
