"""Pictures and films on their way in: fetches, decodes in a helper process, cuts them as each family of models wants.

Pillow and numpy; no torch.

Imports: config, errors, extras, files, registry, sandbox; PIL, asyncio, av, httptools, msgspec, numpy.
Imported by: admin, api_workers, app, bench, build, dialects, fetching, models, multi_model, requests, runner, vision.
"""
