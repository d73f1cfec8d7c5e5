"""docs/which-model.md: the memory that models take and the speed that a memory's bandwidth allows, by shape."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from tureen.bench.limits import CONTEXT
from tureen.config import Config
from tureen.devices.base import DeviceInfo
from tureen.kernels.cpu import native as kernels_module
from tureen.models.config import ModelConfig
from tureen.runner import fit, loading, native
from tureen.runner.packed_copy import Planned
from tureen.weights.source import ModelSource, model_config

SHAPES: Final = Path(__file__).with_name("model_shapes.json")
CONTEXT_LENGTH: Final = 8192
BANDWIDTHS: Final = (20, 40, 80, 160)  # GB/s
REACHED: Final = 0.74  # of the bandwidth, by one stream: measured, see docs/performance.md
MACHINES: Final = (4, 8, 16, 32, 64, 128)  # GiB
FREE: Final = 0.8  # of a machine's memory, once its system runs
EXAMPLE: Final = ("Qwen/Qwen3-4B", 40)
INTRO: Final = """\
```
tureen show smollm2:135m         # what a model needs, and whether it fits; of a hub model also before the download
tureen check                     # the line `reads`: how fast this machine reads memory
```

Two figures decide:

- **Memory**: the weights, the KV cache of one full context, and the workspace must fit. `tureen show NAME` counts them.
- **Bandwidth**: for each token of one stream, the processor reads all weights that act once. So tokens a second are at
  most the bandwidth divided by the bytes that a token reads. More cores help only until they use the whole bandwidth.

{example} in 4 bits on a machine that reads {bandwidth} GB/s: **about {speed} tok/s**, in {memory} GiB.

## By model

In 4 bits (`--quantization int4`), with a context of {context} tokens. A GGUF file in Q4_K_M takes about as much.
8 bits take nearly twice the memory, and halve the speed.

{table}

- **Needs** is what `tureen show` counts, for the same settings. **Machine** is the smallest memory of which it takes at
  most {free} %: the system needs the rest. None of 25 measured shapes took more memory
  than `tureen show` said ([performance](performance.md#shapes-of-todays-models)).
- **Reads** is what a token reads: the weights that act, and the KV cache of {short} tokens. A model with experts
  (`A3B`: 3 billion of 30 act) needs much memory and reads little.
- **tok/s** is {reached} % of the bandwidth divided by that. {reached} % is what one stream reached on the machine of
  [performance](performance.md#what-the-machine-allows-and-what-is-reached); on others it may be more or less. At a
  high bandwidth small models stay below it: each token takes another 0.35 ms. Several streams share the reads, so
  together they are faster.

## By machine

| memory | data sheet |
|---|---|
| two channels of DDR4-3200 | 51 GB/s |
| two channels of DDR5-5600 | 90 GB/s |
| eight channels of DDR4-3200 | 205 GB/s |
| eight channels of DDR5-4800 | 307 GB/s |

The data sheet is channels × 8 bytes × transfers a second. A virtual machine gets a share of it: the one that
[performance](performance.md) describes read 26 to 40 GB/s with two CPUs. Measure yours with `tureen check`."""
HEADING: Final = ("model", "weights", "needs", "machine", "reads", *(f"{speed} GB/s" for speed in BANDWIDTHS))


class Sized(NamedTuple):
    """What a model takes. `num_weights`: all; `needed`, `read`: bytes in memory, and for each token."""

    name: str
    num_weights: int
    needed: int
    read: int

    def speed(self, gb_s: float) -> float:
        """Returns the tokens a second of one stream at a bandwidth."""
        return REACHED * gb_s * 1e9 / self.read


class _Boundless(DeviceInfo, frozen=True):
    """A CPU on which everything fits."""

    def free_bytes(self) -> int:
        return 1 << 60


def fit_page(generated: str) -> str:
    """Returns the page. `generated`: the comment that such pages begin with."""
    models = sized_models()
    [example] = [model for model in models if model.name == EXAMPLE[0]]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (HEADING, ("---",) * len(HEADING), *map(_row, models)))
    values = {
        "example": example.name.partition("/")[2],
        "bandwidth": EXAMPLE[1],
        "speed": _rounded(example.speed(EXAMPLE[1])),
        "memory": f"{example.needed / (1 << 30):.1f}",
        "context": f"{CONTEXT_LENGTH:,}",
        "table": table,
        "free": f"{FREE:.0%}".rstrip("%"),
        "short": CONTEXT,
        "reached": f"{REACHED:.0%}".rstrip("%"),
    }
    return "\n".join(["# Which model fits", "", generated, "", INTRO.format(**values), ""])


def sized_models() -> list[Sized]:
    """Returns the models of the page, the smallest first."""
    shapes: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return sorted((size_of(name, shape) for name, shape in shapes.items()), key=lambda model: model.num_weights)


def size_of(name: str, shape: dict[str, Any]) -> Sized:
    """Returns what a model of this config.json takes in 4 bits, as `tureen show` counts it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        source = ModelSource(name, Path(folder), "safetensors")
        config = Config(load_format="dummy", quantization="int4", context_length=CONTEXT_LENGTH)
        model = loading.describe(model_config(source))
        need = fit.memory_need(source, config)
        planned, _ = native.plan_weights(_kernels(), source, config, model, _Boundless("cpu", "cpu", 1))
        read = sum(_share(weight.name, model) * _bytes_of(weight) for weight in planned)
    num_weights = sum(math.prod(weight.shape) for weight in planned)
    return Sized(name, num_weights, need.needed, round(read + CONTEXT * need.kv_per_token))


def _share(name: str, model: ModelConfig) -> float:
    """Returns the share of a weight that a token reads: of experts those that act, of the embedding a row."""
    if ".experts." in name:
        experts = next(filter(None, map(model.experts_of, range(model.num_layers))))
        return experts.num_chosen / experts.count
    return 0.0 if "embed_tokens" in name and not model.tie_embeddings else 1.0


def _bytes_of(planned: Planned) -> int:
    if not planned.format:
        return 4 * math.prod(planned.shape)
    return int(_kernels().packed_bytes(planned.format, *planned.shape))


def _kernels() -> ModuleType:
    kernels = kernels_module.load()
    if kernels is None:
        raise RuntimeError(kernels_module.MISSING)
    return kernels


def _row(model: Sized) -> Iterator[str]:
    needed = model.needed / (1 << 30)
    machine = next((f"{size} GiB" for size in MACHINES if needed <= FREE * size), "more")
    yield from (f"`{model.name}`", f"{model.num_weights / 1e9:.1f}B", f"{needed:.1f} GiB", machine)
    yield f"{model.read / (1 << 30):.2f} GiB"
    yield from (_rounded(model.speed(gb_s)) for gb_s in BANDWIDTHS)


def _rounded(value: float) -> str:
    """Returns a number with two digits that count."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}" if value < 100 else f"{round(value, -1):.0f}"
