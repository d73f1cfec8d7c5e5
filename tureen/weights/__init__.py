"""Model files: sources, GGUF, safetensors, ONNX, quantisations. No torch except in `tensors`.

Imports: config, contract, errors, extras, fetching, files, log, registry, text; jsonschema_rs, msgspec, numpy, torch.
Imported by: bench, build, control, fleet, lora, models, recipes, replicas, runner.
"""
