"""Draws tokens: parameters, logit processors in their order, sampler, log-probabilities, random numbers.

Imports: contract, errors, extras, grammar, kernels, logit_processor, sandbox; dill, msgspec, numpy, torch.
Imported by: bench, engine, runner.
"""
