"""Model files: sources, GGUF, safetensors, ONNX, quantisations. No torch except in `tensors`.

Imports: config, contract, errors, extras, fetching, files, log, registry, text; jsonschema_rs, msgspec, numpy, torch.
Imported by: admin, bench, build, data_parallel, lora, models, multi_model, recipes, runner.
"""
