"""Towers with arrays of torch on a device that is not the processor, in bfloat16: torch's meta device, which computes
shapes, types and devices, and refuses to mix devices."""

import importlib

import pytest
import tiny_idefics3
import tiny_llava
import tiny_pixtral
import tiny_qwen_vl
import torch
from runner_driver import folder_source

from tureen.media.families import find_family
from tureen.registry import find_model
from tureen.runner.loading import architecture_of, describe
from tureen.vision.arrays import is_matrix
from tureen.vision.torch_arrays import TorchArrays
from tureen.weights.source import model_config, preprocessor_config

MODULES = (tiny_llava, tiny_pixtral, tiny_idefics3, tiny_qwen_vl)
MODELS = [(module, variant, "image") for module in MODULES for variant in module.VARIANTS]


@torch.inference_mode()
def _result(work):
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize(("tiny", "variant", "modality"), [*MODELS, (tiny_llava, "onevision", "video")])
def test_a_tower_keeps_to_its_device_and_its_type(tiny, variant, modality, tmp_path):
    tiny.write(tmp_path, variant)
    source = folder_source(tmp_path)
    hf = model_config(source)
    pictures = [tiny_llava.picture(57, 31, seed) for seed in range(1 + (modality == "video"))]
    [prepared] = find_family(hf, preprocessor_config(source)).prepare(pictures, modality)
    arrays = TorchArrays(torch.device("meta"), torch.bfloat16)
    vision, weights = find_model(architecture_of(hf)).parse_vision(hf), {}
    for name, shape in vision.weights(describe(hf).hidden_size).items():
        values = arrays.empty(*shape)
        weights[name] = arrays.matrix(values) if is_matrix(name, shape) else values
    embedder = importlib.import_module(vision.module).make(vision, arrays, weights, 50_000)
    pixels = arrays.narrowed(arrays.constant(prepared.pixels.transpose(0, 3, 1, 2).copy()))
    embeddings = _result(embedder.embed(pixels, tuple(prepared.layout)))
    assert (embeddings.device.type, embeddings.dtype) == ("meta", torch.bfloat16)
    assert embeddings.shape[0] == prepared.num_tokens
