"""Model files: sources, GGUF, safetensors, ONNX, quantisations. No torch except in `tensors`.

Imports: contract, errors, fetching, files, log, registry, text; huggingface_hub, msgspec, numpy, torch.
Imported by: build, control, lora, models, recipes, runner.
"""
