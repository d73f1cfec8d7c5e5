"""Runs `tureen doctor`: the report of `tureen check`, then memory, disk, extras, servers, and a model that runs.

Names no user, host or path, and shows no value of a variable, so that it can go into a bug report.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from typing import Any, Final

import msgspec

from tureen.bench import check
from tureen.config import ENV_PREFIX, Config, cache_dir
from tureen.devices import cgroups, cpu
from tureen.errors import TureenError
from tureen.fetching import names
from tureen.fetching.pull import find_here
from tureen.offline import OfflineEngine
from tureen.run_files import running
from tureen.runner.fit import MemoryNeed, advice, memory_need
from tureen.weights.source import open_model

SECONDS: Final = 5.0
PROMPT: Final = "A history of the world: chapter one."
EXTRAS: Final = {
    "torch": "CUDA, --kernels torch",
    "transformers": "--model-impl transformers",
    "PIL": "pictures",
    "av": "films in MP4 and WebM",
    "cryptography": "encrypted keys of certificates",
}
"""Modules that only some settings need, and which."""
Lines = list[tuple[str, str]]


class Speed(msgspec.Struct, frozen=True):
    """The measured speed of one stream. `context`: tokens that stood before the middle of them."""

    tokens: int
    seconds: float
    context: int


def examine(model: str, config: Config) -> Lines:
    """Returns the report, a fact a line; measures a model that is on this machine for some seconds."""
    report = check.make_report()
    pairs = [*check.rows_of(report), *_memory(), _disk(config), *_extras(), _settings(), _servers(config)]
    path = find_here(names.parse(model), config)
    if path is None:
        return [*pairs, ("model", f"{model} is not on this machine: nothing was measured; run tureen pull {model}")]
    config = msgspec.structs.replace(config, model_path=str(path))
    try:
        source = open_model(path, config)
        need = memory_need(source, config)
        pairs += [("model", source.name), *_fit(need, advice(source, config, need))]
        if need.fits:
            pairs.append(("speed", speed_line(measure(config), need, report)))
    except TureenError as error:
        pairs.append(("model", f"cannot run: {error.message.replace(str(path), path.name)}"))
    return pairs


def lines_of(pairs: Lines) -> list[str]:
    """Returns the report as lines for people."""
    return [f"{name:<13}{text}" for name, text in pairs]


def _memory() -> Lines:
    groups = cgroups.memory()
    limit = f"; a control group allows {_gib(min(group.limit for group in groups))}" if groups else ""
    return [("memory", f"{_gib(cpu.free_bytes())} free of {_gib(cpu.total_bytes())}{limit}")]


def _disk(config: Config) -> tuple[str, str]:
    folder = cache_dir(config)
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    may = "" if os.access(existing, os.W_OK) else "; it cannot be written: choose another --download-dir"
    return "disk", f"{_gib(shutil.disk_usage(existing).free)} free where models are kept{may}"


def _extras() -> Lines:
    there = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    missing = [f"{name} ({purpose})" for name, purpose in EXTRAS.items() if name not in there]
    return [("extras", ", ".join(there) or "none"), ("", f"not installed: {', '.join(missing) or 'nothing'}")]


def _settings() -> tuple[str, str]:
    named = sorted(name for name in os.environ if name.startswith((ENV_PREFIX, "HF_")) or name.endswith("_PROXY"))
    return "variables", f"{', '.join(named) or 'none'} (of ours, the hub's and for proxies; values are not shown)"


def _servers(config: Config) -> tuple[str, str]:
    number = len(running(config))
    busy = ": they share this machine with what is measured" if number else ""
    return "servers", f"{number} running{busy}"


def _fit(need: MemoryNeed, remedy: str) -> Lines:
    verdict = "fits" if need.fits else f"does not fit: take {remedy}"
    cache = f" + {_mib(need.kv_cache)} KV cache of {need.context:,} tokens" if need.kv_per_token else ""
    return [
        ("", f"{_mib(need.needed)} needed ({_mib(need.weights)} weights{cache}), {_mib(need.free)} free: {verdict}")
    ]


def measure(config: Config, seconds: float = SECONDS) -> Speed:
    """Has a model generate one stream for `seconds`. Raises TureenError."""
    quiet = msgspec.structs.replace(config, log_level="error", grammar_backend="none")
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": None}  # to the context's end
    with OfflineEngine(quiet) as engine:
        engine.generate(PROMPT, {**params, "max_new_tokens": 8})  # what is made once is made now
        first: Any = None
        last: Any = None
        start = end = 0.0
        for last in engine.generate(PROMPT, params, stream=True):
            end = time.monotonic()
            if first is None:
                first, start = last["meta_info"], end
            if end - start > seconds:
                break
    tokens = last["meta_info"]["completion_tokens"] - first["completion_tokens"]
    return Speed(tokens, end - start, first["prompt_tokens"] + tokens // 2)


def speed_line(speed: Speed, need: MemoryNeed, report: check.Report) -> str:
    """Says what was measured, and what this machine's memory allows."""
    rate = speed.tokens / speed.seconds if speed.seconds else 0.0
    text = f"{rate:,.1f} tok/s for one stream, measured over {speed.seconds:.1f} s"
    if not report.machine.measured:
        return text
    gb_s = max(measurement.read_gb_s for measurement in report.machine.measured)
    bound = gb_s * 1e9 / (need.weights + need.kv_per_token * speed.context)
    return f"{text}; reading its weights at {gb_s:.1f} GB/s would allow {bound:,.0f}: {rate / bound:.0%} of it"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB"
