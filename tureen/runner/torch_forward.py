"""The forward pass in plain torch, on any device: the reference that every faster one is compared with."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import compress
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tureen.attention.base import AttentionBackend, AttentionNeeds, CapturedBackend, ModelInput
from tureen.attention.choice import AUTO, find_backend
from tureen.config import Config
from tureen.contract.runner import Batch, Capacity, KvPart
from tureen.devices.base import DeviceInfo
from tureen.devices.cpu import trim
from tureen.devices.dtypes import default_dtype
from tureen.errors import StartupError
from tureen.kernels.fused import find_draw, find_fused
from tureen.layers.kept_states import KeptStates
from tureen.log import Progress
from tureen.lora.adapter import Adapter
from tureen.lora.torch_adapters import StepAdapters
from tureen.models.config import ModelConfig
from tureen.models.torch_decoder import DecoderModel, layer_shape
from tureen.runner import loading, torch_pool
from tureen.runner.cuda_graphs import CudaRecorder, DecodeSteps, Recorder, can_capture
from tureen.runner.forward import ForwardOutput, hidden_ranges, score_pieces
from tureen.runner.inputs import make_input
from tureen.runner.kv_pool import bytes_of_kv, plan_capacity
from tureen.runner.model_runner import ModelRunner, make_sampler
from tureen.runner.parts import ForwardParts, rope_facts
from tureen.runner.torch_trace import TorchTrace
from tureen.runner.trace import TraceOptions
from tureen.sampling.torch_arithmetic import TorchArithmetic
from tureen.weights.source import ModelSource, model_config

if TYPE_CHECKING:
    from tureen.lora.torch_segments import SegmentAdapters
    from tureen.models.torch_ranked import RankedDecoder


class TorchForward:
    """A Forward: a model in torch, its attention and the device that they are on."""

    def __init__(
        self,
        model: DecoderModel | RankedDecoder,
        adapters: StepAdapters | SegmentAdapters,
        attention: AttentionBackend,
        page_size: int,
        device: DeviceInfo,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype_name(dtype)
        self.activations = ""
        self.device_name = device.name
        self._model = model
        self._attention = attention
        self._page_size = page_size
        self._vocab_size = model.config.vocab_size
        self._device = torch.device(device.name)
        self._arithmetic = TorchArithmetic(self._device)
        self._adapters = adapters
        self._steps: DecodeSteps | None = None

    @torch.inference_mode()
    def capture(self, recorder: Recorder, capacity: Capacity, scratch_page: int) -> None:
        """Captures and replays decode steps from now on, if the model and the attention backend allow it. scratch_page:
        see DecodeSteps."""
        if not isinstance(self._attention, CapturedBackend):
            return
        if isinstance(self._model, DecoderModel) and can_capture(self._model, capacity):
            self._steps = DecodeSteps(self._model, self._attention, capacity, recorder, self._device, scratch_page)

    @torch.inference_mode()
    def run(self, batch: Batch, *, best_only: bool = False) -> ForwardOutput:
        if self._steps is not None:
            self._adapters.select((), self._device)
            captured = self._steps.run(batch, best_only=best_only)
            if captured is not None:
                return captured
        inputs, states = self._states(batch)
        hidden = tuple(self._model.last_hidden(states[list(tokens)]).cpu().numpy() for tokens in hidden_ranges(batch))
        scored = self._scored(states, score_pieces(batch, self._vocab_size))
        if inputs.sampled is None:
            return ForwardOutput(scored=scored, hidden=hidden)
        logits = self._arithmetic.prepare(self._model.logits(states.index_select(0, inputs.sampled)))
        if best_only:
            return ForwardOutput(self._arithmetic.greedy(logits, ()), scored=scored, hidden=hidden)
        return ForwardOutput((), logits, self._arithmetic.peaks(logits), scored, hidden)

    def _states(self, batch: Batch) -> tuple[ModelInput, Tensor]:
        """Computes a step's hidden states before the final norm."""
        inputs = make_input(batch, self._page_size, self._device)
        self._attention.plan(inputs)
        self._adapters.select([row.adapter for row in batch.rows for _ in row.token_ids], self._device)
        return inputs, self._model.forward(inputs, self._attention)

    def _scored(self, states: Tensor, pieces: list[range]) -> Iterator[Tensor]:
        for piece in pieces:
            with torch.inference_mode():
                logits = self._model.logits(states[list(piece)])
            yield logits

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        self._adapters.load(number, adapter)

    def unload_adapter(self, number: int) -> None:
        self._adapters.unload(number)

    def count_experts(self, *, is_on: bool) -> None:
        for experts in self._model.experts():
            experts.counts = torch.zeros(experts.count, dtype=torch.int64, device=self._device) if is_on else None

    def take_expert_counts(self) -> list[list[int]]:
        taken = []
        for experts in self._model.experts():
            if experts.counts is not None:
                taken.append(experts.counts.tolist())
                experts.counts.zero_()
        return taken

    def start_trace(self, options: TraceOptions) -> TorchTrace:
        return TorchTrace(options, on_gpu=self._device.type == "cuda")


class TorchForwardFactory:
    """Makes the parts of a forward pass by torch: the model, and tensors for keys and values."""

    def __init__(
        self,
        device: DeviceInfo,
        dtype: torch.dtype,
        model: ModelConfig,
        capacity: Capacity,
        attention: ModuleType,
        progress: Progress,
    ) -> None:
        """attention: a module of `tureen.attention` that declares a backend."""
        self.model = model
        self._attention = attention
        self._device = device
        self._dtype = dtype
        self.capacity = capacity
        self._progress = progress
        self._captures = False

    def load(self, source: ModelSource, config: Config) -> DecoderModel:
        loading.require_memory(
            _weight_bytes(self.model, self._dtype, self._device), dtype_name(self._dtype), self._device
        )
        place = torch.device(self._device.name)
        with place:
            model = DecoderModel(self.model, self._dtype)
        tensors = loading.weights(
            source, model_config(source), self.model, load_format=config.load_format, progress=self._progress
        )
        model.load(tensors)
        model.finish(self.capacity.context_len, place)
        if self._device.type == "cuda" and config.kernels != "torch":
            self._captures = True
            fused = find_fused(place, self._dtype, self.model.hidden_size)
            if fused is not None:
                model.fuse(fused)
        return model

    def make_cache(self) -> torch_pool.KvPool:
        capacity = self.capacity
        return torch_pool.allocate(
            self.model.kv_layers,
            self._dtype,
            num_pages=capacity.num_pages + (self._device.type == "cuda"),  # the last is the scratch page
            page_size=capacity.page_size,
            device=self._device,
            num_window_pages=capacity.num_window_pages,
            state_shape=(capacity.num_states, self.model.state_floats),
        )

    def assemble(self, weights: DecoderModel, cache: torch_pool.KvPool) -> TorchForward:
        layers = [layer_shape(self.model, layer) for layer in self.model.cached_layers or (0,)]
        weights.states = None if cache.states is None else KeptStates(cache.states)
        attention = self._attention.make_backend(layers, cache.keys, cache.values)
        adapters = StepAdapters(weights.linears())
        forward = TorchForward(weights, adapters, attention, self.capacity.page_size, self._device, self._dtype)
        if self._captures:
            forward.capture(CudaRecorder(), self.capacity, self.capacity.num_pages)
        return forward

    def value(self, weights: DecoderModel, name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = weights.weight(name).float().cpu().numpy()
        return values

    def pieces(self, cache: torch_pool.KvPool, part: KvPart, number: int) -> list[NDArray[np.uint8]]:
        return [tensor[number].view(torch.uint8).reshape(-1).cpu().numpy() for tensor in self._tensors(cache, part)]

    def fill(self, cache: torch_pool.KvPool, part: KvPart, number: int, data: memoryview) -> None:
        source = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        for tensor in self._tensors(cache, part):
            own, source = source[: tensor[number].nbytes], source[tensor[number].nbytes :]
            tensor[number].view(torch.uint8).view(-1).copy_(own)

    def _tensors(self, cache: torch_pool.KvPool, part: KvPart) -> list[Tensor]:
        """Returns the tensors that have a part at the index of its number; keys before values."""
        if part == "state":
            return [] if cache.states is None else [cache.states]
        is_apart = self.capacity.num_window_pages > 0
        in_part = [(is_apart and layer.has_window) == (part == "window") for layer in self.model.kv_layers]
        keys = list(compress(cache.keys, in_part))
        values = [value for key, value in zip(keys, compress(cache.values, in_part), strict=True) if value is not key]
        return [*keys, *values]

    def arithmetic(self) -> dict[str, Any]:
        is_gpu = self._device.type == "cuda"
        return {
            "backend": f"torch {torch.__version__}",
            "attention": self._attention.__name__,
            "dtype": dtype_name(self._dtype),
            "device": torch.cuda.get_device_name() if is_gpu else torch.backends.cpu.get_cpu_capability(),
            "threads": 0 if is_gpu else self._device.num_threads,
            "ropes": rope_facts(self.model, self.capacity.context_len),
        }

    def trim(self) -> None:
        gc.collect()  # layers and adapters hold each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim()


def load_runner(source: ModelSource, config: Config, device: DeviceInfo, progress: Progress) -> ModelRunner:
    """Loads a model that is on disk. Memory is checked before it is taken. Raises StartupError."""
    torch.set_num_threads(device.num_threads)
    dtype = default_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    refuse_native_settings(config, dtype)
    shape = loading.describe(model_config(source))
    num_bytes = _weight_bytes(shape, dtype, device)
    loading.require_memory(num_bytes, dtype_name(dtype), device)
    cache_bytes = bytes_of_kv(config, shape, dtype.itemsize)
    capacity = plan_capacity(config, shape, kv_bytes=cache_bytes, weight_bytes=num_bytes, device=device)
    attention = find_attention(config, shape, device, dtype)
    factory = TorchForwardFactory(device, dtype, shape, capacity, attention, progress)
    parts = ForwardParts(factory, source, config)
    is_fast = device.type == "cuda" and config.kernels != "torch"
    place = torch.device(device.name)
    draw_kernel = find_draw(place, shape.vocab_size) if is_fast else None
    sampler = make_sampler(config, shape.vocab_size, TorchArithmetic(place, draw_kernel))
    return ModelRunner(parts.assemble(), sampler, capacity, shape, parts)


def find_attention(config: Config, model: ModelConfig, device: DeviceInfo, dtype: torch.dtype) -> ModuleType:
    """Finds the attention backend; see find_backend."""
    layers = tuple(layer_shape(model, layer) for layer in model.cached_layers or (0,))
    is_plain = config.kernels == "torch" and device.type == "cuda" and config.attention_backend == AUTO
    name = "reference" if is_plain else config.attention_backend
    return find_backend(name, AttentionNeeds(device.type, dtype_name(dtype), layers, config.page_size))


def refuse_native_settings(config: Config, dtype: torch.dtype) -> None:
    """Raises StartupError for what only the native kernels can do."""
    if config.quantization is not None:
        raise StartupError(
            f"--quantization {config.quantization}: torch computes with weights in --dtype; leave it out, or use the "
            "native kernels (--device cpu --kernels native)",
            field="quantization",
        )
    if config.activations != "auto":
        raise StartupError(
            f"--activations {config.activations}: torch computes with activations in --dtype; leave it out, or use the "
            "native kernels (--device cpu --kernels native)",
            field="activations",
        )
    if config.kv_cache_dtype not in ("auto", dtype_name(dtype)):
        raise StartupError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: torch keeps the KV cache in --dtype, here {dtype_name(dtype)}; "
            "leave it out, or use the native kernels (--device cpu --kernels native)",
            field="kv_cache_dtype",
        )


def _weight_bytes(shape: ModelConfig, dtype: torch.dtype, device: DeviceInfo) -> int:
    with torch.device("meta"):
        model = DecoderModel(shape, dtype)
    return model.num_bytes() + head_copy_bytes(shape, dtype, device)


def head_copy_bytes(shape: ModelConfig, dtype: torch.dtype, device: DeviceInfo) -> int:
    """Returns the bytes of a head beside the embedding whose weights it has: on a CPU it keeps its own layout."""
    if not shape.tie_embeddings or device.type != "cpu":
        return 0
    return shape.vocab_size * shape.hidden_size * dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
