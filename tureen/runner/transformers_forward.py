"""Runs any decoder that the installed transformers has, with this server's paged attention and scheduler. It is slow.

A step's tokens go through the model as one sequence; only attention looks from one token to another, and attention is
ours. A model with layers that mix tokens by other means is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, AttentionNeeds, LayerShape
from tureen.attention.choice import find_backend
from tureen.config import Config
from tureen.contract.runner import Batch
from tureen.devices.base import DeviceInfo
from tureen.devices.dtypes import default_dtype
from tureen.errors import InvalidRequest, StartupError
from tureen.extras import require
from tureen.files import check_regular_below
from tureen.kernels import linear as kernel
from tureen.log import Progress
from tureen.lora.adapter import Adapter
from tureen.models.config import ModelConfig
from tureen.runner import loading, torch_pool
from tureen.runner.forward import ForwardOutput, hidden_ranges, score_pieces
from tureen.runner.inputs import make_input
from tureen.runner.kv_pool import KvBytes, plan_capacity
from tureen.runner.model_runner import ModelRunner, make_sampler
from tureen.runner.torch_trace import TorchTrace
from tureen.runner.trace import TraceOptions
from tureen.runner.transformers_check import check, num_pages, own_samples
from tureen.sampling.torch_arithmetic import TorchArithmetic
from tureen.weights.source import ModelSource

NAME = "tureen"  # of our attention, in transformers' table
HARMLESS = frozenset(
    {"dropout", "sliding_window", "softcap", "position_ids", "use_cache", "is_causal", "cache_position"}
    | {"output_hidden_states"}
)
"""Keywords of an attention call that are honoured, or change nothing here. Any other that is set is refused."""
PROBE = 4  # tokens of the run that shows what a model's layers look like


FAULTS = (ValueError, LookupError, OSError, ImportError, RuntimeError, TypeError, AttributeError, ArithmeticError)
"""Errors that code of transformers raises for a model or a config that it does not fit."""


class AttentionCall(NamedTuple):
    """The arguments with which a layer's attention was called."""

    shape: LayerShape
    unknown: tuple[str, ...]  # what this attention does not do


class TransformersForward:
    """A Forward: a model of transformers with our attention in its layers."""

    def __init__(self, model: Any, page_size: int, device: DeviceInfo, dtype: torch.dtype) -> None:
        self.activations = ""
        self.dtype = str(dtype).removeprefix("torch.")
        self.device_name = device.name
        self.attention: AttentionBackend | None = None  # None: only look at what it is asked for
        self.seen: dict[int, AttentionCall] = {}  # by layer
        self._model = model
        self._page_size = page_size
        self._device = torch.device(device.name)
        self._arithmetic = TorchArithmetic(self._device)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: object = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Computes attention in place of transformers': [1, heads, tokens, head_dim] each -> [1, tokens, heads,
        head_dim]. The mask is ignored: the pages say which tokens see which."""
        layer = module.layer_idx
        if self.attention is None:
            scale = arguments.get("scaling")
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            shape = LayerShape(
                q.shape[1], k.shape[1], q.shape[3], scale, arguments.get("sliding_window"), arguments.get("softcap")
            )
            known = HARMLESS | {"scaling"}
            is_set = (name for name, value in arguments.items() if value is not None and value is not False)
            unknown = tuple(name for name in is_set if name not in known)
            if v.shape != k.shape:
                unknown += ("values of another size than keys",)
            if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
                unknown += ("tokens that attend to later ones",)
            self.seen[layer] = AttentionCall(shape, unknown)
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3]), None
        q, k, v = (vectors[0].transpose(0, 1) for vectors in (q, k, v))
        return self.attention.forward(q, k, v, layer).view(1, *q.shape[:2], -1), None

    @torch.inference_mode()
    def run(self, batch: Batch, *, best_only: bool = False) -> ForwardOutput:
        assert self.attention is not None
        inputs = make_input(batch, self._page_size, self._device)
        self.attention.plan(inputs)
        sampled = [] if inputs.sampled is None else inputs.sampled.tolist()
        pieces = score_pieces(batch, self._model.get_output_embeddings().weight.shape[0])
        needed = [*sampled, *itertools.chain(*pieces)]
        embeddings = self._model.get_input_embeddings()(inputs.token_ids)
        if inputs.embedded is not None:
            places, vectors = inputs.embedded
            embeddings[places] = vectors.to(embeddings.dtype)
        logits, states = _outputs(self._model, embeddings, inputs.positions, needed or [0])
        scored = iter(logits[len(sampled) :].split([len(piece) for piece in pieces]) if pieces else ())
        hidden = tuple(states[list(tokens)].float().cpu().numpy() for tokens in hidden_ranges(batch))
        if not sampled:
            return ForwardOutput(scored=scored, hidden=hidden)
        drawn = self._arithmetic.prepare(logits[: len(sampled)].clone())
        if best_only:
            return ForwardOutput(self._arithmetic.greedy(drawn, ()), scored=scored, hidden=hidden)
        return ForwardOutput((), drawn, self._arithmetic.peaks(drawn), scored, hidden)

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        raise InvalidRequest(
            "adapters are not supported with --model-impl transformers", field="lora_path", code="invalid_adapter"
        )

    def unload_adapter(self, number: int) -> None:
        """Does nothing: no adapter can be loaded here."""

    def count_experts(self, *, is_on: bool) -> None:
        """Raises InvalidRequest: transformers does not tell which experts a token used."""
        raise InvalidRequest("experts cannot be counted with --model-impl transformers", code="not_supported")

    def take_expert_counts(self) -> list[list[int]]:
        return []

    def start_trace(self, options: TraceOptions) -> TorchTrace:
        return TorchTrace(options, on_gpu=self._device.type == "cuda")


def load_runner(source: ModelSource, config: Config, device: DeviceInfo, progress: Progress) -> ModelRunner:
    """Loads a model that is on disk. Memory is checked before it is taken. Raises StartupError."""
    torch.set_num_threads(device.num_threads)
    if source.format == "gguf":
        raise StartupError(
            "--model-impl transformers: needs a folder with config.json and safetensors, not a GGUF file"
        )
    dtype = default_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    weight_bytes = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
    loading.require_memory(weight_bytes, str(dtype).removeprefix("torch."), device)
    progress("load weights", 0, 1)
    model = _load(source, dtype, device)
    progress("load weights", 1, 1)
    forward = TransformersForward(model, config.page_size, device, dtype)
    progress("compare with transformers", 0, 1)
    with _faults_of_the_model():
        samples = own_samples(model)
        _take_over(model)
        shapes = _look_at(forward, model, device)
        described = _describe(model.config, shapes[0])
        forward.attention = _make_attention(shapes, described, num_pages(config.page_size), config, device, dtype)
        check(forward, samples, config.page_size, dtype)
    progress("compare with transformers", 1, 1)
    token_bytes = torch_pool.bytes_per_token(described, dtype)
    capacity = plan_capacity(config, described, kv_bytes=KvBytes(token_bytes), weight_bytes=0, device=device)
    forward.attention = _make_attention(shapes, described, capacity.num_pages, config, device, dtype)
    sampler = make_sampler(config, described.vocab_size, TorchArithmetic(torch.device(device.name)))
    return ModelRunner(forward, sampler, capacity, described)


def _load(source: ModelSource, dtype: torch.dtype, device: DeviceInfo) -> Any:
    require("--model-impl transformers", "transformers", field="model_impl")
    import transformers  # noqa: PLC0415 - seconds to import

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        check_regular_below(source.path)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except FAULTS as error:
        raise _fault("cannot load it", error) from None
    model, report = loaded
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise StartupError(
            f"--model-impl transformers: the files lack {len(report['missing_keys'])} weights: {missing}"
        )
    _check_text(model.config.get_text_config())
    return model.eval().to(device.name)


def _take_over(model: Any) -> None:
    """Makes the model use our attention and our linear layers."""
    import transformers  # noqa: PLC0415 - seconds to import

    transformers.AttentionInterface.register(NAME, _route)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        _pack(module, is_turned=type(module) is transformers.pytorch_utils.Conv1D)


@contextmanager
def _faults_of_the_model() -> Iterator[None]:
    """Turns whatever the model's own code raises into a StartupError."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:  # noqa: BLE001 - any class of transformers runs here
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise StartupError(
            "--model-impl transformers: the model's own code in transformers fails with this server's attention "
            f"({what}); such models are not supported, take one that `tureen models` lists",
            field="model_impl",
        ) from None


def _make_attention(
    shapes: list[LayerShape],
    model: ModelConfig,
    pages: int,
    config: Config,
    device: DeviceInfo,
    dtype: torch.dtype,
) -> AttentionBackend:
    """Returns our attention over a new KV cache of this number of pages. Raises StartupError."""
    needs = AttentionNeeds(device.type, str(dtype).removeprefix("torch."), tuple(shapes), config.page_size)
    backend = find_backend(config.attention_backend, needs)
    pool = torch_pool.allocate(model.kv_layers, dtype, num_pages=pages, page_size=config.page_size, device=device)
    attention: AttentionBackend = backend.make_backend(shapes, pool.keys, pool.values)
    return attention


def _check_text(text: Any) -> None:
    """Raises StartupError for what cannot be seen in a call of attention."""
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = {str(rope.get("rope_type")) for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    for kind in ("dynamic", "longrope"):
        if kind in kinds:
            raise StartupError(
                f"--model-impl transformers: rotary scaling {kind} depends on the longest sequence of a step; such "
                "models are not supported",
                field="model_impl",
            )
    if getattr(text, "attention_chunk_size", None):
        raise StartupError(
            "--model-impl transformers: attention in chunks is not supported (attention_chunk_size)", field="model_impl"
        )


def _pack(module: Any, *, is_turned: bool) -> None:
    """Has a linear layer computed by our kernel; `is_turned`: its weight is [inputs, outputs]."""
    if not is_turned and type(module) is not torch.nn.Linear:
        return
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    module.forward = partial(_linear, kernel.pack(weight.T.contiguous() if is_turned else weight, bias), bias)


def _route(module: Any, *vectors: Any, **arguments: Any) -> tuple[Tensor, None]:
    result: tuple[Tensor, None] = module.tureen_forward.attend(module, *vectors, **arguments)
    return result


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Computes a linear layer so that a row's result does not depend on how many there are; see kernels/linear.py."""
    return kernel.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def _outputs(model: Any, embeddings: Tensor, positions: Tensor, needed: list[int]) -> tuple[Any, Any]:
    """Compute one sequence, [tokens, hidden size]. Return the logits of the needed tokens, and all last states."""
    output = model(
        inputs_embeds=embeddings[None],
        position_ids=positions[None],
        use_cache=False,
        output_hidden_states=True,
        logits_to_keep=torch.tensor(needed, device=embeddings.device),
    )
    return output.logits[0].float(), output.hidden_states[-1][0]


def _fault(what: str, error: Exception) -> StartupError:
    told = " ".join(str(error).split())[:300]
    return StartupError(
        f"--model-impl transformers: transformers {what}: {type(error).__name__}: {told}", field="model_impl"
    )


@torch.inference_mode()
def _look_at(forward: TransformersForward, model: Any, device: DeviceInfo) -> list[LayerShape]:
    """Returns each layer's attention, found by running the model once. Raises StartupError for what cannot be run."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.tureen_forward = forward
    try:
        embeddings = model.get_input_embeddings()(torch.zeros(PROBE, dtype=torch.int64, device=device.name))
        _outputs(model, embeddings, torch.arange(PROBE, device=device.name), [0])
        _ = model.get_output_embeddings().weight.shape
    except FAULTS as error:
        raise _fault("cannot run it with embeddings in place of tokens", error) from None
    text = model.config.get_text_config()
    layers = text.num_hidden_layers
    missing = [layer for layer in range(layers) if layer not in forward.seen]
    if missing:
        raise StartupError(
            f"--model-impl transformers: layer {missing[0]} has no attention that can be replaced; such models are "
            "not supported",
            field="model_impl",
        )
    unknown = sorted({name for seen in forward.seen.values() for name in seen.unknown})
    if unknown:
        raise StartupError(
            f"--model-impl transformers: the model's attention uses {', '.join(unknown)}, which is not supported",
            field="model_impl",
        )
    shapes = [forward.seen[layer].shape for layer in range(layers)]
    if _has_window(text) and not any(shape.window for shape in shapes):
        raise StartupError(
            "--model-impl transformers: the sliding window is only in the model's mask; such models are not supported",
            field="model_impl",
        )
    if len({(shape.num_kv_heads, shape.head_dim) for shape in shapes}) > 1:
        raise StartupError("--model-impl transformers: layers whose keys differ in size are not supported")
    return shapes


def _has_window(text: Any) -> bool:
    if not getattr(text, "sliding_window", None) or getattr(text, "use_sliding_window", True) is False:
        return False
    kinds = getattr(text, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds


def _describe(hf: Any, layer: LayerShape) -> ModelConfig:
    """Describes a model as far as the sizes of the KV cache and the limits of requests need."""
    text = hf.get_text_config()
    return ModelConfig(
        architecture=(hf.architectures or [""])[0],
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", 1),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        norm_eps=1.0,
        context_len=text.max_position_embeddings,
        activation="",
        attention_scale=layer.scale,
        windows=(None,) * text.num_hidden_layers,
        ropes=(None,) * text.num_hidden_layers,
    )
