"""A model's weights and its KV cache, each of which can be freed and made again; other weights can replace them. No
torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.config import Config
from tureen.contract.runner import Capacity, KvPart, KvSizes
from tureen.errors import Conflict, InvalidRequest, NotFound, StartupError, Unavailable, echo
from tureen.layers.rope import frequencies
from tureen.log import get_logger
from tureen.models.config import STACKED, ModelConfig
from tureen.runner import loading
from tureen.runner.forward import Forward
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import is_offset

Tag = Literal["weights", "kv_cache"]
MAX_NUMBERS = 1 << 18
"""Most numbers of a weight that are returned at once: the engine waits meanwhile."""

DECIDING = (
    "dtype", "quantization", "activations", "kv_cache_dtype", "load_format", "page_size", "kernels",
    "attention_backend",
)  # fmt: skip
"""Settings on which the bytes of a KV page depend."""

log = get_logger("runner")


class ForwardFactory(Protocol):
    """Makes the parts of forward passes of one kind, for models of one shape."""

    model: ModelConfig
    capacity: Capacity

    def load(self, source: ModelSource, config: Config) -> Any:
        """Loads a model's weights. Memory is checked before it is taken. Raises StartupError."""

    def make_cache(self) -> Any:
        """Returns an empty KV cache."""

    def assemble(self, weights: Any, cache: Any) -> Forward: ...

    def value(self, weights: Any, name: str) -> NDArray[np.float32]:
        """Returns the value of a weight in `model.weights()`, as it is computed with."""

    def trim(self) -> None:
        """Gives memory that was freed back to the system."""

    def pieces(self, cache: Any, part: KvPart, number: int) -> list[NDArray[np.uint8]]:
        """Returns the bytes of a part of the cache. They are its memory, or a copy on a device of its own."""

    def fill(self, cache: Any, part: KvPart, number: int, data: memoryview) -> None:
        """Writes the bytes of a part, which `pieces` returned, one after another."""

    def arithmetic(self) -> dict[str, Any]:
        """Returns what decides the last bit of a result besides model, settings and code, as plain data; under `files`
        the paths of files of which the content does."""


class Served(NamedTuple):
    """The checkpoint that the weights were read from."""

    source: ModelSource
    config: Config
    files: tuple[tuple[str, int, int], ...]  # name, bytes, time of the last change


class ForwardParts:
    """Makes the forward pass of one runner, and makes it again whenever its parts have changed. It is the PageMemory of
    the KV cache that is there."""

    def __init__(self, factory: ForwardFactory, source: ModelSource, config: Config) -> None:
        """Loads the model. Raises StartupError."""
        self._factory = factory
        self._config = config
        self._served = Served(source, config, files_of(source))
        self._num_loads = 1
        self._hf = model_config(source)
        self._weights: Any = factory.load(source, config)
        self._cache: Any = factory.make_cache()

    def assemble(self) -> Forward | None:
        """Returns the forward pass; None while a part is away."""
        if self._weights is None or self._cache is None:
            return None
        return self._factory.assemble(self._weights, self._cache)

    def update(self, source: ModelSource, load_format: str | None) -> None:
        """Replaces the weights that are there, or that were given back, by those of `source`.

        The old ones are freed when their last reference is dropped. Raises InvalidRequest or Unavailable, and changes
        nothing, if the new ones cannot be loaded.
        """
        config = self._config
        if load_format is not None:
            config = msgspec.structs.replace(config, load_format=load_format)
        served = Served(source, config, files_of(source))
        try:
            hf = model_config(source)
            _check_same(self._factory.model, loading.describe(hf))
            if hf["eos_token_id"] != self._hf["eos_token_id"]:
                raise StartupError("its end tokens differ from the served model's")
            self._weights = self._factory.load(source, config)
        except StartupError as error:
            raise _refused(source, error) from None
        except MemoryError:
            raise Unavailable(
                "model_path: there is no memory for these weights in addition to the served ones; release those first "
                "(/release_memory_occupation)",
                field="model_path",
                code="out_of_memory",
            ) from None
        self._served, self._hf = served, hf
        self._num_loads += 1

    def release(self, tags: Collection[Tag]) -> None:
        """Frees the parts named by `tags`. What `assemble` returned must not be used, or held, any more."""
        if "weights" in tags:
            self._weights = None
        if "kv_cache" in tags:
            self._cache = None

    def renew_cache(self) -> None:
        """Exchanges a cache that is there for an empty one, whose memory is taken as it is written.

        What `assemble` returned must not be held any more.
        """
        if self._cache is not None:
            self._cache = None
            self._cache = self._factory.make_cache()

    def resume(self, tags: Collection[Tag]) -> None:
        """Makes the parts named by `tags` again; weights come from the files.

        Raises Conflict where the files have changed, InvalidRequest where they cannot be loaded.
        """
        if "weights" in tags and self._weights is None:
            source, config, _ = self._served
            self._check_unchanged()
            try:
                self._weights = self._factory.load(source, config)
                self._check_unchanged()  # nor while they were read
            except StartupError as error:
                raise _refused(source, error) from None
            except Conflict:
                self._weights = None
                raise
        if "kv_cache" in tags and self._cache is None:
            self._cache = self._factory.make_cache()

    def _check_unchanged(self) -> None:
        """Raises Conflict where the files are not those that the weights were read from."""
        source, _, files = self._served
        if files_of(source) != files:
            raise Conflict(
                "the model's files have changed since the weights were released; load them by "
                "/update_weights_from_disk",
                code="weights_changed",
            )

    def trim(self) -> None:
        """Gives the memory of freed parts back to the system."""
        self._factory.trim()

    @property
    def sizes(self) -> KvSizes:
        """The bytes of the cache's parts. It must be there."""
        capacity = self._factory.capacity
        return KvSizes(
            len(self.read("page", 0)),
            len(self.read("window", 0)) if capacity.num_window_pages else 0,
            len(self.read("state", 0)) if capacity.num_states else 0,
        )

    def read(self, part: KvPart, number: int) -> memoryview:
        """Returns a copy of the bytes of a part of the cache; none while the cache is away."""
        cache = self._cache
        return memoryview(b"") if cache is None else _joined(self._factory.pieces(cache, part, number))

    def write(self, part: KvPart, number: int, data: memoryview) -> None:
        """Writes the bytes of a part of the cache, which must be there."""
        self._factory.fill(self._cache, part, number, data)

    @property
    def processor(self) -> str:
        """The instruction set of the kernels, or the GPU's name."""
        arithmetic = self._factory.arithmetic()
        return str(arithmetic.get("isa") or arithmetic["device"])

    def facts(self) -> dict[str, Any]:
        """Returns what the bytes of a page depend on, as plain data. `load` tells weights from those that were there
        before. `files`: paths of the files that the weights were read from; None where other content may lie there
        now. `libraries`: paths of the code that computes."""
        source, config, files = self._served
        settings = {name: getattr(config, name) for name in DECIDING}
        arithmetic = self._factory.arithmetic()
        libraries = list(arithmetic.pop("files", ()))
        paths = [str(path) for path in source.files] if files and files_of(source) == files else None
        return {
            "load": self._num_loads,
            "files": [] if config.load_format == "dummy" else paths,
            "libraries": libraries,
            "facts": {
                "model": msgspec.to_builtins(self._factory.model),
                "settings": settings,
                "arithmetic": arithmetic,
                "window_pages": self._factory.capacity.num_window_pages > 0,
            },
        }

    def value(self, name: str, truncate_size: int) -> list[Any]:
        """Returns the first `truncate_size` rows of a weight, by its name in a Hugging Face checkpoint, as lists of
        numbers.

        Raises NotFound for a name that the model does not have, InvalidRequest for more than MAX_NUMBERS.
        """
        shapes = self._factory.model.weights()
        names = _parts_of(loading.our_name(name, self._hf), self._factory.model, shapes)
        if not names:
            near = difflib.get_close_matches(name[:256], shapes, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise NotFound(f"name {echo(name)}: the model has no such weight{hint}", field="name")
        rows = min(truncate_size, sum(shapes[part][0] for part in names))
        num_numbers = rows * (shapes[names[0]][1] if len(shapes[names[0]]) > 1 else 1)
        if num_numbers > MAX_NUMBERS:
            raise InvalidRequest(
                f"truncate_size {truncate_size}: {num_numbers} numbers, but at most {MAX_NUMBERS} are returned; lower "
                "it",
                field="truncate_size",
            )
        numbers = np.concatenate([self._factory.value(self._weights, part) for part in names])[:truncate_size]
        if self._factory.model.unit_offset_norm and is_offset(names[0]):
            numbers = numbers - 1
        values: list[Any] = numbers.tolist()
        return values


def _parts_of(name: str, model: ModelConfig, shapes: Mapping[str, Any]) -> list[str]:
    """Returns the model's weights that stand in the checkpoint's weight of that name, one after another; none:
    unknown."""
    if name == "lm_head.weight" and model.tie_embeddings:
        return ["model.embed_tokens.weight"]
    *before, module, kind = ["", *name.rsplit(".", 2)][-3:]
    stacked = [".".join((*before, part, kind)) for part in STACKED.get(module, ())]
    return [candidate for candidate in (stacked or [name]) if candidate in shapes]


def rope_facts(model: ModelConfig, context_len: int) -> list[str]:
    """Returns the rotary frequencies of a model's layers as text, one for each kind."""
    return [frequencies(rope, size, context_len).tobytes().hex() for rope, size in model.rope_kinds()]


def _joined(pieces: Sequence[NDArray[np.uint8]]) -> memoryview:
    """Returns a copy of the bytes; none if all layers have a window, and so a page has no bytes."""
    return np.concatenate([np.empty(0, np.uint8), *pieces]).data


def files_of(source: ModelSource) -> tuple[tuple[str, int, int], ...]:
    """Returns name, size and time of change of the model's files, without reading them; () where they cannot be looked
    at."""
    try:
        stats = [(file.name, file.stat()) for file in source.files]
    except OSError:
        return ()
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in stats)


def _check_same(served: ModelConfig, other: ModelConfig) -> None:
    """Raises StartupError naming what differs. Numbers that are equal in float32 are: some files keep them so."""
    for name in served.__struct_fields__:
        mine, its = getattr(served, name), getattr(other, name)
        if mine == its or (isinstance(mine, float) and isinstance(its, float) and np.float32(mine) == np.float32(its)):
            continue
        facts = f", {echo(its)} and not {echo(mine)}" if isinstance(mine, (int, float, str)) else ""
        raise StartupError(f"its {name} differs from the served model's{facts}")


def _refused(source: ModelSource, error: StartupError) -> InvalidRequest:
    """Returns the error for the client: where the files lie is in the log only."""
    log.warning("weights not loaded: %s", error.message)
    message = error.message
    for path in (source.path, source.path.resolve(), source.path.resolve().parent):
        message = message.replace(str(path), source.name)
    return InvalidRequest(f"model_path: {message}", field="model_path")
