"""Random adapters for tiny models, written by peft; the oracle is peft's own adapted copy of the model."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    model: torch.nn.Module, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: object
) -> PeftModel:
    """Saves an adapter with weights large enough to change every token; returns the adapted copy of the model."""
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**(defaults | settings))).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.data = values.to(dtype).float()
        adapted.save_pretrained(folder)
    change_tensors(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return adapted


def change_tensors(folder: Path, change) -> None:
    tensors = change(load_file(folder / WEIGHTS))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / WEIGHTS)


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))
