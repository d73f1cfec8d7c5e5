"""Draws tokens: parameters, logit processors in their order, sampler, log-probabilities, random numbers.

Imports: errors, grammar, kernels, logit_processor, runner, sandbox, types; dill, msgspec, numpy, regex, torch.
Imported by: bench, control, dialects, engine, front, requests, runner, text, types.
"""
