"""Loads a model for the native CPU kernels: weights packed as they are stored, or in fewer bits. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.config import Config
from tureen.contract.runner import Capacity, KvPart
from tureen.devices.base import DeviceInfo
from tureen.devices.cpu import trim
from tureen.errors import StartupError
from tureen.kernels.cpu import native
from tureen.log import Progress, get_logger, no_progress
from tureen.models.config import ModelConfig
from tureen.runner import loading
from tureen.runner.graphs import TapeForward, record
from tureen.runner.kv_pool import NO_DRAFT, DraftNeed, KvBytes, plan_capacity, window_tokens, with_windows
from tureen.runner.model_runner import ModelRunner, make_sampler
from tureen.runner.packed_copy import LEAST_BYTES, PackedCopy, Planned, origin_of
from tureen.runner.parts import ForwardParts, rope_facts
from tureen.sampling.native_arithmetic import NativeArithmetic
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored, to_float32

if TYPE_CHECKING:
    from tureen.runner.shared_weights import SharedWeights

PLAIN = ("F32", "F16", "BF16")
OF_DTYPE = {"float32": "F32", "bfloat16": "BF16"}
ROUTERS = (
    ".mlp.gate.weight",
    ".mlp.shared_expert_gate.weight",
    ".linear_attn.in_proj_a.weight",
    ".linear_attn.in_proj_b.weight",
    ".altup.modality_router.weight",
    ".altup.prediction_coefs.weight",
    ".altup.correction_coefs.weight",
)
"""Endings of names of weights that are never stored in fewer bits: they are small, and their result must not change."""
SMALL_MODEL = 300_000_000
"""Weights, from which on speed goes before the last bits: inputs of matrices have 8 bits without --activations, and
F16 becomes BF16: docs/decisions/0072."""
GROUP = 32  # inputs that share a scale
BLOCK = 16  # tokens that the KV cache keeps together
NO_BYTES = np.empty(0, np.uint8)

log = get_logger("runner")


class NativeCache(NamedTuple):
    """The memory of sequences: keys and values of layers with attention, and the states of the others."""

    kv: Any
    states: Any  # None: all layers have attention


class NativeForwardFactory:
    """Makes the parts of a forward pass by native kernels: packed weights by name, the KV cache, the tape."""

    def __init__(
        self,
        pool: Any,
        device: DeviceInfo,
        model: ModelConfig,
        capacity: Capacity,
        kv_dtype: str,
        progress: Progress,
        first_plan: tuple[list[Planned], int] | None = None,
        shared: SharedWeights | None = None,
    ) -> None:
        """first_plan: what `plan_weights` returned for the weights that are loaded first. shared: where weights lie
        that other engines use, too."""
        self.model = model
        self._first_plan = first_plan
        self._shared = shared
        self._kernels = native.require()
        self._pool = pool
        self._device = device
        self.capacity = capacity
        self._kv_dtype = kv_dtype
        self._progress = progress

    def load(self, source: ModelSource, config: Config) -> dict[str, Any]:
        """Loads a model's weights by name: matrices packed, vectors as float32. See ForwardFactory.load."""
        if self._shared:
            origin = _origin(source, config, self._kernels)
            weights = self._shared.take(origin, self._kernels, lambda: self._make(source, config))
        else:
            weights = self._make(source, config)
        matrices = [weight for weight in weights.values() if not isinstance(weight, np.ndarray)]
        if _is_wide(config, matrices):
            for matrix in matrices:
                matrix.widen()
        return weights

    def _make(self, source: ModelSource, config: Config) -> dict[str, Any]:
        """Returns the weights by name, in memory of their own."""
        planned, num_bytes = self._planned(source, config)
        copy = PackedCopy(source, config, self._kernels, planned) if _is_copied(config, num_bytes) else None
        weights = copy.read(self._device.num_threads, self._progress) if copy else None
        if weights is None:
            hf = model_config(source)
            tensors = loading.weights(source, hf, self.model, load_format=config.load_format, progress=self._progress)
            weights = {
                stored.name: _packed(self._kernels, self._pool, stored, _format_of(stored, config, self.model))
                if len(stored.shape) == 2
                else to_float32(stored)
                for stored in tensors
            }
            if copy:
                copy.write(weights)
        return weights

    def _planned(self, source: ModelSource, config: Config) -> tuple[list[Planned], int]:
        """Returns the plan of the weights and their bytes; worked out once for what is loaded first."""
        first, self._first_plan = self._first_plan, None
        return first or plan_weights(self._kernels, source, config, self.model, self._device)

    def make_cache(self) -> NativeCache:
        model, capacity = self.model, self.capacity
        kv = self._kernels.KvCache(
            model.kv_layers,
            capacity.num_pages,
            capacity.page_size,
            self._kv_dtype,
            num_window_pages=capacity.num_window_pages,
        )
        num_states = capacity.num_states
        return NativeCache(kv, self._kernels.StatePool(num_states, model.state_floats) if num_states else None)

    def assemble(self, weights: Any, cache: NativeCache) -> TapeForward:
        tape = self._kernels.Tape(self._pool, cache.kv, cache.states, self.model.hidden_size, self.model.vocab_size)
        record(tape, self.model, self.capacity.context_len, weights)
        matrices = [weight for weight in weights.values() if not isinstance(weight, np.ndarray)]
        stored = Counter(matrix.format for matrix in matrices).most_common(1)[0][0].lower()
        activations = {matrix.inputs for matrix in matrices} & {"int8", "int16"}
        return TapeForward(tape, stored, max(activations, default=""), self.model.vocab_size)

    def value(self, weights: Any, name: str) -> NDArray[np.float32]:
        weight = weights[name]
        values: NDArray[np.float32] = weight if isinstance(weight, np.ndarray) else weight.unpack()
        return values

    def pieces(self, cache: NativeCache, part: KvPart, number: int) -> list[NDArray[np.uint8]]:
        if part == "state":
            return [cache.states.state(number).view(np.uint8)]
        return [cache.kv.window_page(number) if part == "window" else cache.kv.page(number)]

    def fill(self, cache: NativeCache, part: KvPart, number: int, data: memoryview) -> None:
        self.pieces(cache, part, number)[0][:] = np.frombuffer(data, np.uint8)

    def arithmetic(self) -> dict[str, Any]:
        return {
            "backend": "native",
            "isa": self._kernels.isa(),
            "ropes": rope_facts(self.model, self.capacity.context_len),
            "files": [str(self._kernels.__file__)],
        }

    def trim(self) -> None:
        """Gives freed memory back to the system. Weights and cache are mapped and went at once; this is for the
        rest, and for weights that no engine has any more."""
        if self._shared:
            self._shared.free()
        trim()


def load_draft(
    source: ModelSource, config: Config, device: DeviceInfo, progress: Progress, target: ModelRunner
) -> ModelRunner:
    """Loads a draft model. Its KV cache has as many pages as that of `target`, the model that it guesses for, and it
    computes with the same threads. Raises StartupError."""
    model, bounds = loading.describe(model_config(source)), target.capacity()
    capacity = Capacity(
        num_pages=bounds.num_pages,
        page_size=bounds.page_size,
        max_rows=bounds.max_rows,
        vocab_size=model.vocab_size,
        context_len=min(bounds.context_len, model.context_len),
        hidden_size=model.hidden_size,
    )
    factory = NativeForwardFactory(target.pool, device, model, capacity, _kv_dtype(config), progress)
    parts = ForwardParts(factory, source, config)
    sampler = make_sampler(config, model.vocab_size, NativeArithmetic(target.pool))
    return ModelRunner(parts.assemble(), sampler, capacity, model, parts)


def load_runner(
    source: ModelSource,
    config: Config,
    device: DeviceInfo,
    progress: Progress,
    shared: SharedWeights | None = None,
    draft: DraftNeed = NO_DRAFT,
) -> ModelRunner:
    """Loads a model that is on disk. Memory is checked before it is taken, also that of a draft model. Raises
    StartupError."""
    kernels = native.require()
    model = loading.describe(model_config(source))
    kv_dtype = _kv_dtype(config)
    cache_bytes = bytes_of_kv(kernels, config, model)
    pool = _pool(kernels, device.num_threads, adapts=config.num_threads is None)
    are_there = shared is not None and shared.has(_origin(source, config, kernels))
    plan = None if are_there else plan_weights(kernels, source, config, model, device)
    weight_bytes = draft.weights + (plan[1] if plan else 0)
    cache_bytes = cache_bytes._replace(in_pages=cache_bytes.in_pages + draft.kv_per_token)
    capacity = plan_capacity(config, model, kv_bytes=cache_bytes, weight_bytes=weight_bytes, device=device)
    capacity = msgspec.structs.replace(
        capacity,
        takes_guesses=capacity.num_states == 0,
        kv_bytes_per_token=capacity.kv_bytes_per_token - draft.kv_per_token,
    )
    factory = NativeForwardFactory(pool, device, model, capacity, kv_dtype, progress, plan, shared)
    parts = ForwardParts(factory, source, config)
    sampler = make_sampler(config, model.vocab_size, NativeArithmetic(pool))
    runner = ModelRunner(parts.assemble(), sampler, capacity, model, parts)
    runner.pool = pool
    return runner


def _origin(source: ModelSource, config: Config, kernels: ModuleType) -> str:
    """Names everything that packed weights depend on."""
    return origin_of(source, (config.dtype, config.quantization or "", config.load_format), kernels)


def plan_weights(
    kernels: ModuleType, source: ModelSource, config: Config, model: ModelConfig, device: DeviceInfo
) -> tuple[list[Planned], int]:
    """Returns every weight as it will be in memory, and the bytes that they take.

    Raises StartupError, also when there is less memory than that.
    """
    planned = _plan(source, config, model)
    needed = sum(_bytes_of(kernels, weight) for weight in planned)
    form = "the types of the file" if config.dtype == "auto" else config.dtype
    loading.require_memory(needed, config.quantization or form, device)
    return planned, needed


def weight_bytes(kernels: ModuleType, source: ModelSource, config: Config, model: ModelConfig) -> int:
    """Returns the bytes that the weights will take. Reads headers only. Raises StartupError."""
    return sum(_bytes_of(kernels, weight) for weight in _plan(source, config, model))


def bytes_of_kv(kernels: ModuleType, config: Config, model: ModelConfig) -> KvBytes:
    """Returns the bytes of the KV cache. Raises StartupError for a model that it cannot hold."""
    if config.page_size % BLOCK:
        log.warning("--page-size %d: a multiple of %d wastes no memory of the KV cache", config.page_size, BLOCK)
    try:
        num_tokens, dtype = window_tokens(config, model), _kv_dtype(config)
        cache = kernels.KvCache(model.kv_layers, 1, config.page_size, dtype, num_window_pages=min(num_tokens, 1))
    except ValueError as error:
        raise StartupError(
            f"the native kernels cannot hold this model's keys: {error}; use --kernels torch", field="kernels"
        ) from None
    if dtype == "int4" and all(values_from >= 0 for _, _, values_from, _ in model.kv_layers):
        log.warning(
            "--kv-cache-dtype int4: this model has no values apart from its keys, so int4 takes what int8 takes"
        )
    return with_windows(config, model, KvBytes(cache.bytes_per_token, cache.window_bytes_per_token, num_tokens))


def _pool(kernels: ModuleType, num_threads: int, *, adapts: bool) -> Any:
    try:
        return kernels.Pool(num_threads, adapts)
    except RuntimeError:
        raise StartupError(
            f"--num-threads {num_threads}: the system allows fewer threads; lower it", field="num_threads"
        ) from None


def _plan(source: ModelSource, config: Config, model: ModelConfig) -> list[Planned]:
    """Returns every weight as it will be in memory. Raises StartupError when the files are not what the config says."""
    tensors: Iterable[Stored]
    if config.load_format == "dummy":
        tensors = [Stored(name, shape, "F32", NO_BYTES) for name, shape in model.weights().items()]
    else:
        tensors = loading.weights(source, model_config(source), model, load_format="auto", progress=no_progress)
    return [
        Planned(tensor.name, tensor.shape, _format_of(tensor, config, model) if len(tensor.shape) == 2 else "")
        for tensor in tensors
    ]


def _bytes_of(kernels: ModuleType, planned: Planned) -> int:
    return kernels.packed_bytes(planned.format, *planned.shape) if planned.format else 4 * math.prod(planned.shape)


def _is_copied(config: Config, num_bytes: int) -> bool:
    """Says whether a packed copy is worth keeping. Stored formats are packed nearly as fast as a copy is read:
    docs/decisions/0022-packed-copy.md."""
    is_made = config.quantization is not None and config.load_format != "dummy"
    return config.packed_cache and is_made and num_bytes >= LEAST_BYTES


def _format_of(stored: Stored, config: Config, model: ModelConfig) -> str:
    """Returns the format in which a matrix is packed."""
    if stored.name.endswith(ROUTERS):
        return "F32"
    if config.quantization == "int8":
        return "Q8_ROW"
    if config.quantization == "int4":
        is_layer = ".layers." in stored.name  # the embedding and the head decide too much
        return "Q4_1" if is_layer and stored.shape[1] % GROUP == 0 else "Q8_ROW"
    if config.dtype != "auto":
        return OF_DTYPE[config.dtype]
    if stored.encoding == "F16" and _is_small(model):  # bfloat16 has not all its bits
        return "F32"
    return "BF16" if stored.encoding in PLAIN else stored.encoding


def _is_small(model: ModelConfig) -> bool:
    return sum(map(math.prod, model.weights().values())) < SMALL_MODEL


def _is_wide(config: Config, matrices: list[Any]) -> bool:
    """Says whether inputs of matrices in block formats have 16 bits in place of 8. Raises StartupError where the
    operator chose one of the two and there is no such matrix."""
    if config.activations == "auto":
        return config.quantization is None and sum(matrix.rows * matrix.cols for matrix in matrices) < SMALL_MODEL
    if all(matrix.inputs not in ("int8", "int16") for matrix in matrices):
        raise StartupError(
            f"--activations {config.activations}: no matrix of this model is in a block format; leave it out, or use "
            "--quantization",
            field="activations",
        )
    return config.activations == "int16"


def _packed(kernels: ModuleType, pool: Any, stored: Stored, matrix_format: str) -> Any:
    rows, cols = stored.shape
    return kernels.Matrix.pack(pool, stored.data, stored.encoding, matrix_format, rows, cols, stored.row_order)


def _kv_dtype(config: Config) -> str:
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "float32" if config.dtype == "float32" else "int16"
