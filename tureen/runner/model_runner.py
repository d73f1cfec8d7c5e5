"""Runs batches on one device: forward pass, prompt log-probabilities, sampling."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from tureen.attention.base import AttentionBackend, Span
from tureen.attention.reference import ReferenceAttention
from tureen.config import Config
from tureen.devices.base import DeviceInfo, resolve_device
from tureen.errors import NotFound, StartupError
from tureen.jail.pool import Jail
from tureen.log import Progress, get_logger, no_progress
from tureen.models.base import DecoderModel, layer_shape
from tureen.models.config import ModelConfig
from tureen.registry import find_model
from tureen.runner import kv_pool, loading
from tureen.runner.base import NAN_LOGITS, NOTHING_TO_DRAW, Batch, Capacity, Row, RowOutput, StepOutput
from tureen.runner.inputs import make_input
from tureen.sampling.custom import CustomProcessors, load_registered
from tureen.sampling.sampler import Sampler
from tureen.types import PositionLogprobs
from tureen.weights.load import iter_tensors
from tureen.weights.source import ModelSource, model_config

SCORE_LOGITS = 1 << 22  # most logits computed at once for prompt log-probabilities

log = get_logger("runner")


class ModelRunner:
    """A model with its KV pool and sampler on one device."""

    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        sampler: Sampler,
        capacity: Capacity,
        device: DeviceInfo,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._capacity = capacity
        self._device = device
        self._dtype = dtype
        self._operations: dict[str, Callable[[], object]] = {"device": self._describe_device}

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """One forward pass and sampling. The sampler hears of the batch only once the forward pass has succeeded."""
        hidden: Tensor | None = None
        spans: tuple[Span, ...] = ()
        logits: Tensor | None = None
        if batch.rows:
            inputs = make_input(batch, self._capacity.page_size, self._device.torch_device)
            spans = inputs.spans
            self._attention.plan(inputs)
            hidden = self._model.forward(inputs, self._attention)
            if inputs.sampled is not None:
                logits = self._model.logits(hidden.index_select(0, inputs.sampled))
        for state in batch.new_slots:
            self._sampler.set_slot(state)
        for row in batch.rows:
            self._sampler.catch_up(row.slot, row.start, row.token_ids)
        scores = [
            () if hidden is None else self._score(row, span, hidden)
            for row, span in zip(batch.rows, spans, strict=True)
        ]
        states = [
            () if hidden is None else self._hidden_states(row, span, hidden)
            for row, span in zip(batch.rows, spans, strict=True)
        ]
        drawn = iter(self._sample(batch, logits))
        return StepOutput(
            tuple(
                _combine(next(drawn) if row.sample else RowOutput(), score, state)
                for row, score, state in zip(batch.rows, scores, states, strict=True)
            )
        )

    def capacity(self) -> Capacity:
        return self._capacity

    def call(self, op: str, **args: object) -> object:
        """Operations: `device` -> {"name", "dtype"}. Raises NotFound for an unknown one."""
        if op not in self._operations:
            raise NotFound(f"the runner has no operation {op}")
        return self._operations[op](**args)

    def close(self) -> None:
        """End the processes that belong to it; the tensors go with the object."""
        self._sampler.close()

    def _sample(self, batch: Batch, logits: Tensor | None) -> list[RowOutput]:
        rows = [row for row in batch.rows if row.sample]
        if logits is None:
            return []
        positions = [row.start + len(row.token_ids) for row in rows]
        masks = batch.masks.wait() if batch.masks else {}
        return self._sampler.sample(logits, [row.slot for row in rows], positions, masks)

    def _score(self, row: Row, span: Span, hidden: Tensor) -> tuple[PositionLogprobs, ...] | None:
        """Log-probabilities of the row's score targets, computed in pieces; None when its logits are not numbers."""
        size = max(1, SCORE_LOGITS // self._capacity.vocab_size)
        scores: list[PositionLogprobs] = []
        for begin in range(0, len(row.score_targets), size):
            targets = row.score_targets[begin : begin + size]
            first = span.first + row.score_from + begin
            logits = self._model.logits(hidden[first : first + len(targets)])
            if not bool(torch.isfinite(logits).all()):
                return None
            scores += self._sampler.score(logits, row.slot, targets)
        return tuple(scores)

    def _hidden_states(self, row: Row, span: Span, hidden: Tensor) -> tuple[bytes, ...] | None:
        """Of the positions that the row asks for; None where they are not numbers."""
        if row.hidden_from is None:
            return ()
        states = self._model.last_hidden(hidden[span.first + row.hidden_from : span.first + span.length])
        if not bool(torch.isfinite(states).all()):
            return None
        return tuple(state.tobytes() for state in states.cpu().numpy())

    def _describe_device(self) -> dict[str, str]:
        return {"name": self._device.name, "dtype": str(self._dtype).removeprefix("torch.")}


def load_runner(source: ModelSource, config: Config, *, progress: Progress = no_progress) -> ModelRunner:
    """Load a model that is on disk. Memory is checked before it is taken. Raises StartupError."""
    device = resolve_device(config.device, config.num_threads)
    torch.set_num_threads(device.num_threads)
    dtype = device.default_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    hf = model_config(source)
    module = find_model((hf.get("architectures") or [""])[0])
    shape: ModelConfig = module.parse(loading.flatten(hf))
    context_len = _context_len(config, shape)
    weight_bytes = loading.require_memory(module, shape, dtype, device)
    token_bytes = kv_pool.bytes_per_token(shape, dtype)
    num_pages = kv_pool.fit_pages(
        config,
        token_bytes=token_bytes,
        context_len=context_len,
        free=device.free_bytes() - weight_bytes,
        device=device,
    )
    context_len = _within_pool(context_len, num_pages * config.page_size)
    with torch.device(device.torch_device):
        model: DecoderModel = module.build(shape, dtype)
    if config.load_format == "dummy":
        loading.fill_randomly(model, device.torch_device)
    else:
        loading.fill(model, iter_tensors(source, hf), progress)
    model.finish(context_len, device.torch_device)
    pool = kv_pool.allocate(shape, dtype, num_pages=num_pages, page_size=config.page_size, device=device)
    custom = _custom_processors(config, shape.vocab_size)
    layers = [layer_shape(shape, layer) for layer in range(shape.num_layers)]
    return ModelRunner(
        model,
        ReferenceAttention(layers, pool.keys, pool.values),
        Sampler(config.max_running_requests, shape.vocab_size, device.torch_device, custom),
        Capacity(
            num_pages=num_pages,
            page_size=config.page_size,
            max_rows=config.max_running_requests,
            vocab_size=shape.vocab_size,
            context_len=context_len,
            hidden_size=shape.hidden_size,
            kv_bytes_per_token=token_bytes,
        ),
        device,
        dtype,
    )


def _custom_processors(config: Config, vocab_size: int) -> CustomProcessors:
    """Raises StartupError."""
    registered = load_registered(config.logit_processor)
    jail = Jail(config.max_running_requests, vocab_size) if config.enable_custom_logit_processor else None
    return CustomProcessors(registered, jail)


def _context_len(config: Config, shape: ModelConfig) -> int:
    if config.context_length is not None and config.context_length > shape.context_len:
        raise StartupError(
            f"--context-length {config.context_length} is more than the model's own {shape.context_len}; "
            f"use at most {shape.context_len}",
            field="context_length",
        )
    return config.context_length or shape.context_len


def _within_pool(context_len: int, pool_tokens: int) -> int:
    if pool_tokens < context_len:
        log.warning("the KV cache holds %d tokens, so that is the context length too, not %d", pool_tokens, context_len)
    return min(context_len, pool_tokens)


def _combine(
    drawn: RowOutput, score: tuple[PositionLogprobs, ...] | None, states: tuple[bytes, ...] | None
) -> RowOutput:
    if drawn.error not in (None, NOTHING_TO_DRAW):
        return drawn
    if score is None or states is None:
        return RowOutput(error=NAN_LOGITS)
    return msgspec.structs.replace(drawn, scores=score, hidden_states=states) if score or states else drawn
