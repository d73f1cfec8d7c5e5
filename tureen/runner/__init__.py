"""Executes batches: the forward pass on native kernels or torch, weights and KV cache, sampling, embeddings.

Imports: attention, config, config_facts, contract, devices, errors, extras, fetching, files, grammar, kernels, layers,
log, lora, media, models, registry, sampling, sandbox, struct_warm_up, temporary_folder, vision, weights; msgspec,
numpy, torch, transformers.
Imported by: admin, bench, build, multi_model.
"""
