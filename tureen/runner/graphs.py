"""The forward pass as a tape: the operations of a decoder are recorded once, and replayed with one native call.

A tape holds for any number of rows and tokens; only a step's numbers are handed over. What runs between two steps is
Python, what runs within one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tureen.contract.runner import Batch, Row
from tureen.contract.types import NO_TOKEN
from tureen.kernels.cpu import native
from tureen.layers.activation_names import XIELU
from tureen.layers.latent import Latent
from tureen.layers.layer_inputs import LayerInputs
from tureen.layers.mixers import GatedDelta, KimiDelta, Mamba2, ShortConv
from tureen.layers.rope import axes, frequencies
from tureen.layers.routing import Experts
from tureen.lora.adapter import Adapter
from tureen.models.config import STREAM_MAPS, ModelConfig, qkv_names
from tureen.runner.forward import ForwardOutput, as_wide, hidden_ranges, score_pieces
from tureen.runner.trace import StepTrace, TraceOptions
from tureen.sampling.arithmetic import Peaks

Floats = NDArray[np.float32]
NOTHING = np.empty(0, np.float32)


class TapeForward:
    """A recorded decoder on the CPU: a Forward. `dtype`: the type in which most of its weights are stored."""

    device_name = "cpu"

    def __init__(self, tape: Any, dtype: str, activations: str, vocab_size: int) -> None:
        self.dtype = dtype
        self.activations = activations
        self._tape = tape
        self._vocab_size = vocab_size

    @property
    def seconds(self) -> float:
        """Seconds spent in native code so far."""
        spent: float = self._tape.seconds
        return spent

    @property
    def threads(self) -> int:
        """The number of threads that shared the last step."""
        shared: int = self._tape.threads
        return shared

    def run(self, batch: Batch, *, best_only: bool = False) -> ForwardOutput:
        embedded = [row for row in batch.rows if row.embeds]
        self._tape.run(batch.rows, _embedded(embedded) if embedded else None)
        extras = any(row.score_targets or row.hidden_from is not None for row in batch.rows)
        if best_only and not extras:
            return ForwardOutput(best=self._tape.best())
        hidden = tuple(self._tape.last_hidden(list(tokens)) for tokens in hidden_ranges(batch)) if extras else ()
        pieces = score_pieces(batch, self._vocab_size) if extras else []
        scored = (self._tape.score(list(piece)) for piece in pieces)
        if best_only:
            return ForwardOutput(best=self._tape.best(), scored=scored, hidden=hidden)
        logits, values, token_ids = self._tape.sampled()
        if pieces:
            logits = logits.copy()  # the tape's memory is written again for each piece
        return ForwardOutput((), logits, Peaks(values, token_ids), scored, hidden)

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        for module, factors in adapter.items():
            self._tape.load_adapter(number, module, *map(np.ascontiguousarray, factors))

    def unload_adapter(self, number: int) -> None:
        self._tape.unload_adapter(number)

    def count_experts(self, *, is_on: bool) -> None:
        self._tape.count_experts(is_on)

    def take_expert_counts(self) -> list[list[int]]:
        counts: list[list[int]] = self._tape.take_expert_counts()
        return counts

    def start_trace(self, options: TraceOptions) -> StepTrace:
        return StepTrace(options, lambda: self.seconds)


def _embedded(rows: list[Row]) -> Floats:
    """Returns the embeddings that stand in place of tokens, float32 [count, width], in the order of the step's
    tokens."""
    counts = [sum(token == NO_TOKEN for token in row.token_ids) for row in rows]
    values = [np.frombuffer(row.embeds, np.float32) for row in rows]
    return as_wide([value.reshape(count, -1) for value, count in zip(values, counts, strict=True)])


def record(tape: Any, config: ModelConfig, context_len: int, weights: Mapping[str, Any]) -> None:
    """Records the decoder that `config` describes on the tape.

    weights: checkpoint name -> packed matrix, or float32 [n].
    """
    embedding = weights["model.embed_tokens.weight"]
    tape.embed(embedding, 1.0 if config.embedding_scale is None else config.embedding_scale)
    if config.layer_inputs is not None:
        _record_layer_inputs(tape, config, weights, config.layer_inputs)
    into, out = ([weights[f"model.{name}.{at}.weight"] for at in range(config.num_maps)] for name in STREAM_MAPS)
    if config.streams is not None:
        tape.begin_streams(into)
    for layer in range(config.num_layers):
        own = _Part(weights, f"model.layers.{layer}.")
        _record_layer(tape, config, layer, context_len, own)
        if layer < config.num_deep_inputs:
            tape.add_given()
    if config.streams is not None:
        tape.end_streams(out)
    head = embedding if config.tie_embeddings else weights["lm_head.weight"]
    top = _Part(weights, "")
    tape.head(
        norm=top.norm("model.norm", config),
        matrix=head,
        bias=top.floats("lm_head.bias", is_there=config.head_bias),
        scale=config.logit_scale,
        softcap=config.logit_softcap or 0.0,
    )


def _record_layer_inputs(tape: Any, config: ModelConfig, weights: Mapping[str, Any], inputs: LayerInputs) -> None:
    tape.layer_inputs(
        table=weights["model.embed_tokens_per_layer.weight"],
        projection=weights["model.per_layer_model_projection.weight"],
        norm=_norm(weights["model.per_layer_projection_norm.weight"], NOTHING, config),
        scale=config.hidden_size**-0.5,
        token_scale=inputs.size**0.5,
        sum_scale=2**-0.5,
    )


def _record_layer(tape: Any, config: ModelConfig, layer: int, context_len: int, own: _Part) -> None:
    mix = None if config.streams is None else _stream_mix(config, own)
    if mix is not None:
        tape.predict_streams(mix)
        _record_low_rank(tape, config, layer, own)
    _record_mixer(tape, config, layer, context_len, own)
    if mix is not None:
        tape.join(2**-0.5)
    if config.part_of(layer) != "mixer":
        _record_mlp(tape, config, layer, own)
    if mix is not None:
        tape.correct_streams(mix)
    if config.layer_inputs is not None:
        tape.layer_input(
            module=f"model.layers.{layer}",
            layer=layer,
            gate=own["per_layer_input_gate.weight"],
            activation=config.activation,
            out=own["per_layer_projection.weight"],
            post=own.norm("post_per_layer_input_norm", config),
        )
    if config.has_layer_scales:
        tape.scale(own["layer_scalar"].item())


def _stream_mix(config: ModelConfig, own: _Part) -> Any:
    return native.require().StreamMix(
        router_norm=own.norm("altup.router_norm", config),
        router=own.numbers("altup.modality_router"),
        prediction=own.numbers("altup.prediction_coefs"),
        correction=own.numbers("altup.correction_coefs"),
        scale=own["altup.correct_output_scale"],
    )


def _record_low_rank(tape: Any, config: ModelConfig, layer: int, own: _Part) -> None:
    tape.low_rank(
        module=f"model.layers.{layer}.laurel",
        norm=own.norm("input_layernorm", config),
        left=own["laurel.linear_left.weight"],
        right=own["laurel.linear_right.weight"],
        post=own.norm("laurel.post_laurel_norm", config),
    )


class _Part:
    """The weights under one prefix."""

    def __init__(self, weights: Mapping[str, Any], prefix: str) -> None:
        self._weights = weights
        self.prefix = prefix

    def __getitem__(self, name: str) -> Any:
        return self._weights[self.prefix + name]

    def floats(self, *names: str, is_there: bool = True) -> Floats:
        """Returns vectors one after another; none where `is_there` is false."""
        return np.concatenate([self[name] for name in names]) if is_there else NOTHING

    def numbers(self, name: str) -> Floats:
        """Returns a small matrix as numbers, row after row."""
        numbers: Floats = self[f"{name}.weight"].unpack()
        return np.ascontiguousarray(numbers).reshape(-1)

    def by_token(self, name: str) -> Floats:
        """Returns the weights of a convolution, [channels, 1, tokens] in checkpoints, token by token."""
        kernel: Floats = self[name]
        return np.ascontiguousarray(kernel[:, 0].T).reshape(-1)

    def gated(self, name: str, config: ModelConfig) -> tuple[Any, ...]:
        """Returns an mlp as the tape takes it: its activation, then weight and bias of gate, up and down."""
        gate = () if config.gated_mlp else (None, NOTHING)
        parts = [f"{name}.{part}_proj" for part in (("gate",) if config.gated_mlp else ()) + ("up", "down")]
        pairs = [(self[f"{part}.weight"], self.floats(f"{part}.bias", is_there=config.mlp_bias)) for part in parts]
        constants = NOTHING if config.multipliers.gate == 1 else np.array([config.multipliers.gate], np.float32)
        if config.activation == "xielu":
            positive, negative, slope, most = (self[f"{name}.act_fn.{part}"].item() for part in XIELU)
            grown = [float(np.logaddexp(0, value)) for value in (positive, negative)]
            constants = np.array([grown[0], grown[1] + slope, slope, most], np.float32)
        return config.activation, constants, *gate, *(weight for pair in pairs for weight in pair)

    def norm(self, name: str, config: ModelConfig, *, is_there: bool = True, scale: float = 1.0) -> Any:
        """Returns a norm as the tape takes it, with results times `scale`; an empty one if `is_there` is false."""
        bias = self.floats(f"{name}.bias", is_there=is_there and config.norm_bias)
        weight = self.floats(f"{name}.weight", is_there=is_there)
        return _norm(weight if scale == 1 else weight * np.float32(scale), bias, config)

    def head_norm(self, name: str, config: ModelConfig, *, is_there: bool = True) -> Any:
        """Returns the norm of q or k as the tape takes it; it has no bias."""
        weight = self.floats(f"self_attn.{name}.weight", is_there=is_there and bool(config.qk_norm))
        return _norm(weight, NOTHING, config)


def _norm(weight: Floats, bias: Floats, config: ModelConfig) -> Any:
    return native.require().Norm(weight, config.norm_eps, bias, config.layer_norm)


def _record_mixer(tape: Any, config: ModelConfig, layer: int, context_len: int, own: _Part) -> None:
    mixer = config.mixer_of(layer)
    if config.has_attention(layer) and config.latent is not None:
        _record_latent_attention(tape, config, layer, context_len, own, config.latent)
    elif config.has_attention(layer):
        _record_attention(tape, config, layer, context_len, own)
    if isinstance(mixer, ShortConv):
        _record_short_conv(tape, config, layer, mixer, own)
    elif isinstance(mixer, GatedDelta):
        _record_gated_delta(tape, config, layer, mixer, own)
    elif isinstance(mixer, KimiDelta):
        _record_kimi_delta(tape, config, layer, mixer, own)
    elif isinstance(mixer, Mamba2):
        _record_mamba2(tape, config, layer, mixer, own)


def _record_short_conv(tape: Any, config: ModelConfig, layer: int, conv: ShortConv, own: _Part) -> None:
    tape.short_conv(
        module=f"{own.prefix}conv",
        norm=own.norm("input_layernorm", config),
        in_proj=own["conv.in_proj.weight"],
        in_bias=own.floats("conv.in_proj.bias", is_there=conv.has_bias),
        kernel=own.by_token("conv.conv.weight"),
        bias=own.floats("conv.conv.bias", is_there=conv.has_bias),
        start=config.state_start(layer),
        out=own["conv.out_proj.weight"],
        out_bias=own.floats("conv.out_proj.bias", is_there=conv.has_bias),
        residual_scale=config.residual_scale,
    )


def _record_gated_delta(tape: Any, config: ModelConfig, layer: int, rule: GatedDelta, own: _Part) -> None:
    tape.gated_delta(
        module=f"{own.prefix}linear_attn",
        norm=own.norm("input_layernorm", config),
        in_proj=[own[f"linear_attn.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")],
        kernel=own.by_token("linear_attn.conv1d.weight"),
        decay=np.exp(own["linear_attn.A_log"]),
        dt_bias=own["linear_attn.dt_bias"],
        head_norm=native.require().Norm(own["linear_attn.norm.weight"], config.norm_eps, NOTHING, False),
        num_key_heads=rule.num_key_heads,
        num_value_heads=rule.num_value_heads,
        key_dim=rule.key_dim,
        value_dim=rule.value_dim,
        is_apart=rule.is_apart,
        start=config.state_start(layer),
        out=own["linear_attn.out_proj.weight"],
        residual_scale=config.residual_scale,
    )


def _record_kimi_delta(tape: Any, config: ModelConfig, layer: int, rule: KimiDelta, own: _Part) -> None:
    kernels = np.concatenate([own[f"linear_attn.{name}_conv1d.weight"][:, 0] for name in "qkv"])
    tape.kimi_delta(
        module=f"{own.prefix}linear_attn",
        norm=own.norm("input_layernorm", config),
        in_proj=[own[f"linear_attn.{name}_proj.weight"] for name in ("q", "k", "v", "b", "f_a", "g_a")],
        kernel=np.ascontiguousarray(kernels.T).reshape(-1),
        decay=np.exp(own["linear_attn.A_log"]),
        dt_bias=own["linear_attn.dt_bias"],
        head_norm=native.require().Norm(own["linear_attn.o_norm.weight"], config.norm_eps, NOTHING, False),
        decays=own["linear_attn.f_b_proj.weight"],
        gates=own["linear_attn.g_b_proj.weight"],
        num_heads=rule.num_heads,
        head_dim=rule.head_dim,
        start=config.state_start(layer),
        out=own["linear_attn.o_proj.weight"],
        residual_scale=config.residual_scale,
    )


def _record_mamba2(tape: Any, config: ModelConfig, layer: int, ssm: Mamba2, own: _Part) -> None:
    scales = np.concatenate([np.full(size, scale, np.float32) for scale, size in ssm.channel_scales()])
    kernel = own.by_token("mamba.conv1d.weight").reshape(ssm.kernel, -1) * scales  # as if of the inputs
    norm_weight = own.floats("mamba.norm.weight", is_there=ssm.has_norm)
    tape.mamba2(
        module=f"{own.prefix}mamba",
        norm=own.norm("input_layernorm", config, scale=ssm.in_scale),
        in_proj=own["mamba.in_proj.weight"],
        in_bias=own.floats("mamba.in_proj.bias", is_there=ssm.in_bias),
        kernel=kernel.reshape(-1),
        bias=own.floats("mamba.conv1d.bias", is_there=ssm.conv_bias),
        decay=np.exp(own["mamba.A_log"]),
        dt_bias=own["mamba.dt_bias"],
        skip=own["mamba.D"],
        group_norm=native.require().Norm(norm_weight, config.norm_eps, NOTHING, False),
        gate_last=ssm.has_norm and ssm.gate_last,
        gate_scale=ssm.scales[0],
        step_scale=ssm.scales[4],
        least_step=ssm.step_limits[0],
        most_step=ssm.step_limits[1],
        num_heads=ssm.num_heads,
        head_dim=ssm.head_dim,
        state_dim=ssm.state_dim,
        num_groups=ssm.num_groups,
        start=config.state_start(layer),
        out=own["mamba.out_proj.weight"],
        out_bias=own.floats("mamba.out_proj.bias", is_there=ssm.out_bias),
        residual_scale=config.residual_scale * ssm.out_scale,
    )


def _record_attention(tape: Any, config: ModelConfig, layer: int, context_len: int, own: _Part) -> None:
    rope, keys = config.ropes[layer], config.keys_of(layer)
    has_own, names = keys.of_layer is None, [f"self_attn.{name}" for name in qkv_names(keys)]
    ones = np.ones(keys.head_dim if config.value_norm and has_own else 0, np.float32)
    tape.attention(
        module=f"{own.prefix}self_attn",
        layer=config.cache_place(layer),
        norm=own.norm(
            "input_layernorm", config, is_there=config.norms != "post", scale=config.multipliers.attention_in
        ),
        qkv=[own[f"{name}.weight"] for name in names],
        qkv_bias=own.floats(*(f"{name}.bias" for name in names), is_there=config.qkv_bias),
        gate=[own["self_attn.gate_proj.weight"]] if config.has_gate else [],
        q_norm=own.head_norm("q_norm", config),
        k_norm=own.head_norm("k_norm", config, is_there=has_own),
        v_norm=_norm(ones, NOTHING, config),
        norms_last=config.qk_norm_last,
        num_heads=config.num_heads,
        num_kv_heads=keys.num_heads,
        head_dim=keys.head_dim,
        scale=config.attention_scale,
        softcap=config.attention_softcap or 0.0,
        window=config.windows[layer] or 0,
        frequencies=NOTHING if rope is None else frequencies(rope, keys.head_dim, context_len),
        magnitude=1.0 if rope is None else rope.magnitude,
        is_interleaved=rope is not None and rope.is_interleaved,
        axes=[] if rope is None else axes(rope, keys.head_dim).tolist(),
        growth=0.0 if config.query_growth is None else config.query_growth.beta,
        growth_every=1 if config.query_growth is None else config.query_growth.every,
        sinks=own.floats("self_attn.sinks", is_there=config.has_sinks),
        sees_pictures_whole=config.sees_picture_whole(layer),
        out=own["self_attn.o_proj.weight"],
        out_bias=own.floats("self_attn.o_proj.bias", is_there=config.out_bias),
        post=own.norm("post_attention_layernorm", config, is_there=config.norms in ("post", "both")),
        residual_scale=config.residual_scale * config.multipliers.attention_out,
        is_held=config.norms == "parallel" or (config.mixers_beside and config.mixer_of(layer) is not None),
    )


def _record_latent_attention(
    tape: Any, config: ModelConfig, layer: int, context_len: int, own: _Part, latent: Latent
) -> None:
    rope, heads, low = config.ropes[layer], range(config.num_heads), latent.query_rank > 0
    queries, latents = f"self_attn.{'q_a_proj' if low else 'q_proj'}", "self_attn.kv_a_proj_with_mqa"
    in_bias = own.floats(f"{latents}.bias", is_there=latent.has_bias)
    if latent.has_bias:  # q_proj has no bias
        rows = own[f"{queries}.weight"].rows
        query_bias = own.floats(f"{queries}.bias") if low else np.zeros(rows, np.float32)
        in_bias = np.concatenate([query_bias, in_bias])
    norm = native.require().Norm
    tape.latent_attention(
        module=f"{own.prefix}self_attn",
        layer=config.cache_place(layer),
        norm=own.norm("input_layernorm", config),
        in_proj=[own[f"{queries}.weight"], own[f"{latents}.weight"]],
        in_bias=in_bias,
        query_norm=norm(own.floats("self_attn.q_a_layernorm.weight", is_there=low), latent.norm_eps, NOTHING, False),
        query=[own["self_attn.q_b_proj.weight"]] if low else [],
        latent_norm=norm(own["self_attn.kv_a_layernorm.weight"], latent.norm_eps, NOTHING, False),
        keys=[own[f"self_attn.k_b_proj.{head}.weight"] for head in heads],
        values=[own[f"self_attn.v_b_proj.{head}.weight"] for head in heads],
        values_from=latent.rope_dim,
        scale=config.attention_scale,
        window=config.windows[layer] or 0,
        frequencies=NOTHING if rope is None else frequencies(rope, latent.rope_dim, context_len),
        magnitude=1.0 if rope is None else rope.magnitude,
        is_interleaved=rope is not None and rope.is_interleaved,
        out=own["self_attn.o_proj.weight"],
        out_bias=own.floats("self_attn.o_proj.bias", is_there=latent.has_bias),
        residual_scale=config.residual_scale,
    )


def _record_mlp(tape: Any, config: ModelConfig, layer: int, own: _Part) -> None:
    names = {"pre": "post_attention_layernorm", "both": "pre_feedforward_layernorm", "parallel": "input_layernorm"}
    name = names.get(config.norms, "") if config.part_of(layer) == "both" else "input_layernorm"
    norm = own.norm(name, config, is_there=config.norms != "post")
    experts, post_name = config.experts_of(layer), "post_feedforward_layernorm"
    is_beside = experts is not None and experts.are_beside
    if experts is None or is_beside:
        tape.mlp(
            module=f"{own.prefix}mlp",
            norm=norm,
            gated=own.gated("mlp", config),
            post=own.norm(
                f"{post_name}_1" if is_beside else post_name, config, is_there=config.norms in ("post", "both")
            ),
            residual_scale=1.0 if is_beside else config.residual_scale * config.multipliers.mlp_out,
            is_held=is_beside,
            cutoff=config.mlp_cutoff(layer),
        )
    if experts is not None:
        norm = own.norm("pre_feedforward_layernorm_2", config) if is_beside else norm
        _record_experts(tape, config, experts, norm, own)


def _record_experts(tape: Any, config: ModelConfig, experts: Experts, norm: Any, own: _Part) -> None:
    assert config.norms == "pre" or experts.are_beside, "the tape has no norms after experts alone"
    has_shared = experts.shared_size > 0
    router_scale = own.floats("mlp.gate.scale", is_there=experts.are_beside) * np.float32(config.hidden_size**-0.5)
    tape.experts(
        module=f"{own.prefix}mlp",
        norm=norm,
        router=own["mlp.gate.weight"],
        router_bias=own.floats("mlp.gate.bias", is_there=experts.has_bias),
        each=[own.gated(f"mlp.experts.{index}", config) for index in range(experts.count)],
        score=experts.score,
        jitter=experts.jitter,
        num_chosen=experts.num_chosen,
        is_normalised=experts.is_normalised,
        factor=experts.factor,
        correction=own.floats("mlp.gate.e_score_correction_bias", is_there=experts.has_correction),
        num_groups=experts.num_groups,
        chosen_groups=experts.num_chosen_groups,
        group_top_k=experts.group_top_k,
        shared=[own.gated("mlp.shared_expert", config)] if has_shared else [],
        shared_gate=own["mlp.shared_expert_gate.weight"] if has_shared and experts.has_shared_gate else None,
        router_norm=_norm(router_scale, NOTHING, config),
        scales=own.floats("mlp.gate.per_expert_scale", is_there=experts.are_beside),
        own_post=own.norm("post_feedforward_layernorm_2", config, is_there=experts.are_beside),
        post=own.norm("post_feedforward_layernorm", config, is_there=experts.are_beside),
        residual_scale=config.residual_scale,
    )
