"""Model files: sources, GGUF, safetensors, ONNX, quantisations. No torch except in `tensors`.

Imports: errors, files, log, registry, text, types; huggingface_hub, msgspec, numpy, torch.
Imported by: build, control, lora, models, recipes, runner.
"""
