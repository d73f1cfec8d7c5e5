"""Reads low-rank adapters (Hu et al. 2021, arXiv:2106.09685) as peft writes them: a folder with adapter_config.json and
adapter_model.safetensors. No torch.

An adapter adds scale * up · (down · x) to what a linear layer makes of x.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tureen.errors import InvalidRequest, StartupError, echo
from tureen.files import open_regular
from tureen.layers.mixers import GatedDelta, Mixer
from tureen.models.config import STACKED, ModelConfig
from tureen.registry import find_model
from tureen.weights.mapped import TensorInfo
from tureen.weights.name_patterns import PatternFault, compile_pattern
from tureen.weights.safetensors import SafetensorsFile
from tureen.weights.stored import BY_NAME, Stored, local_name, to_float32

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 512
MAX_ALPHA = 1e9
MAX_ENTRIES, MAX_PATTERNS = 1 << 14, 64  # of rank_pattern and of alpha_pattern; plain names are no patterns
KNOWN: Mapping[str, tuple[object, ...]] = {
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),  # others change the base model
    "kasa_config": (),
    "layer_replication": (),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "monteclora_config": (),
    "peft_type": ("LORA",),
    "target_parameters": ([],),
    "trainable_token_indices": ([],),
    "use_bdlora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
}
"""Keys of the config that could change what an adapter computes -> what they may be, beside null."""
READ = frozenset({"alpha_pattern", "lora_alpha", "r", "rank_pattern", "use_rslora"})
HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type", "velora_config",
    }
)  # fmt: skip
"""Keys that say how an adapter was trained, or what its tensors' names say too."""
PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")
"""A key of rank_pattern that is a name, as nearly all are: its dots, escaped or not, stand for dots."""
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")


class Factors(NamedTuple):
    """The two factors of the matrix that an adapter adds to one linear layer's."""

    down: NDArray[np.float32]  # [rank, inputs]
    up: NDArray[np.float32]  # [outputs, rank], scaled


Adapter = Mapping[str, Factors]
"""The factors by module, as `ModelConfig.weights` names it (model.layers.0.self_attn.q_proj)."""


class ModuleValue(NamedTuple):
    """An entry of rank_pattern or alpha_pattern."""

    matches: Callable[[str], bool]  # says whether it is for the module of this name
    value: object


class ModuleTensors(NamedTuple):
    """The tensors of one module in the adapter's file."""

    down: TensorInfo
    up: TensorInfo
    scale: float
    places: Mapping[
        str, NDArray[np.intp]
    ]  # the model's own matrices that it changes -> which of its outputs are theirs


def read_adapter(folder: str, model: ModelConfig) -> Adapter:
    """Reads the adapter in `folder` for a model. Nothing large is read before all is known to fit.

    Raises InvalidRequest, field lora_path, for what is no adapter, is not supported, or is for another model.
    """
    path = _existing(folder)
    config = _read_config(path / CONFIG)
    file = _open(path / WEIGHTS)
    shapes = model.weights()
    ranks, alphas = (_entries(config, key) for key in ("rank_pattern", "alpha_pattern"))
    parts = [_part(module, pair, model, config, shapes, ranks, alphas) for module, pair in _pairs(file).items()]
    counts = Counter(name for part in parts for name in part.places)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise _fault(f"changes {echo(twice)} twice, under different names")
    moved = next((name for name in counts if ".linear_attn." in name), None)
    if moved is not None and any(_has_moved_heads(mixer) for mixer in model.mixers):
        raise _fault(f"changes {echo(moved)}, whose heads a GGUF file stores in another order; use the safetensors")
    adapter: dict[str, Factors] = {}
    for part in parts:
        adapter |= _factors(file, part)
    return adapter


def _has_moved_heads(mixer: Mixer | None) -> bool:
    """Returns whether value heads are in another order than in the checkpoints that adapters are trained for."""
    return isinstance(mixer, GatedDelta) and mixer.is_apart and mixer.num_value_heads != mixer.num_key_heads


def _existing(folder: str) -> Path:
    for name in (CONFIG, WEIGHTS):
        try:
            path = Path(folder).expanduser()
            is_there = (path / name).exists()
        except (OSError, RuntimeError):  # a name too long, a folder that is closed, the home of an unknown user
            is_there = False
        if not is_there:
            raise _fault(f"has no readable {name}; give a folder that peft's save_pretrained wrote, with safetensors")
    return path


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise _fault(f"has a {CONFIG} of more than {MAX_CONFIG_BYTES >> 20} MiB")
        config = json.loads(content)
    except OSError as error:
        raise _fault(f"has a {CONFIG} that cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _fault(f"has a {CONFIG} that is not valid JSON") from None
    if not isinstance(config, dict):
        raise _fault(f"has a {CONFIG} that is not a JSON object")
    _check_config(config)
    return config


def _check_config(config: Mapping[str, Any]) -> None:
    if "peft_type" not in config:
        raise _fault(f"has a {CONFIG} without peft_type")
    for key, value in config.items():
        if key in KNOWN and value is not None and value not in KNOWN[key]:
            raise _fault(f"has {key} {echo(value)} in its {CONFIG}, which is not supported")
        if key not in KNOWN and key not in READ and key not in HARMLESS and value:
            raise _fault(
                f"has {echo(key)} in its {CONFIG}, which this version does not know; remove it if it only affects "
                "training"
            )


def _open(path: Path) -> SafetensorsFile:
    try:
        return SafetensorsFile(path)
    except StartupError as error:
        raise _fault(f"has a {WEIGHTS} that cannot be read: {error.message.rsplit(': ', 1)[-1]}") from None


def _pairs(file: SafetensorsFile) -> dict[str, dict[str, TensorInfo]]:
    """Returns, by the file's name of each module, its factors by letter."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for info in file.tensors.values():
        match = TENSOR.fullmatch(info.name)
        if match is None:
            raise _fault(
                f"has the tensor {echo(info.name)}, which is not supported; adapters change linear layers only"
            )
        if info.encoding.name not in BY_NAME or len(info.shape) != 2 or 0 in info.shape:
            raise _fault(f"has the tensor {echo(info.name)}, which is not a matrix of F32, F16 or BF16 numbers")
        pair = pairs.setdefault(match["module"], {})
        if match["factor"] in pair:
            raise _fault(f"has lora_{match['factor']} of {echo(match['module'])} twice")
        pair[match["factor"]] = info
    if not pairs:
        raise _fault("has no weights")
    return pairs


def _part(
    module: str,
    pair: Mapping[str, TensorInfo],
    model: ModelConfig,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: list[ModuleValue],
    alphas: list[ModuleValue],
) -> ModuleTensors:
    if len(pair) != 2:
        raise _fault(f"has only one of lora_A and lora_B of {echo(module)}")
    places = _places(module, model, shapes)  # first: a name that the model has is short
    (rank, inputs), (outputs, up_rank) = pair["A"].shape, pair["B"].shape
    told = _by_pattern(ranks, module, config.get("r"))
    if type(told) is not int or not 1 <= told <= MAX_RANK:
        raise _fault(f"has the rank {echo(told)} for {echo(module)}; it must be 1 to {MAX_RANK}")
    if (rank, up_rank) != (told, told):
        raise _fault(f"has factors of rank {rank} and {up_rank} for {echo(module)}, but its {CONFIG} says {told}")
    shape = shapes[f"{next(iter(places))}.weight"][1], sum(map(len, places.values()))
    if (inputs, outputs) != shape:
        raise _fault(
            f"is for another model: its {echo(module)} has {inputs} inputs and {outputs} outputs, here there are "
            f"{shape[0]} and {shape[1]}"
        )
    alpha = _by_pattern(alphas, module, config.get("lora_alpha"))
    return ModuleTensors(pair["A"], pair["B"], _scale(alpha, module, rank, config), places)


def _scale(alpha: object, module: str, rank: int, config: Mapping[str, Any]) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= MAX_ALPHA:
        raise _fault(f"has the lora_alpha {echo(alpha)} for {echo(module)}; it must be a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)  # rsLoRA: arXiv:2312.03732


def _entries(config: Mapping[str, Any], key: str) -> list[ModuleValue]:
    """Reads rank_pattern or alpha_pattern. As in peft, an entry is for a module whose name it matches, or the end of
    whose name after a dot."""
    table = config.get(key) or {}
    if not isinstance(table, dict):
        raise _fault(f"has a {key} that is not an object")
    num_patterns = sum(PLAIN.fullmatch(name) is None for name in table)
    if len(table) > MAX_ENTRIES or num_patterns > MAX_PATTERNS:
        raise _fault(
            f"has {len(table)} entries in its {key}, {num_patterns} of them patterns; at most {MAX_ENTRIES} entries "
            f"and {MAX_PATTERNS} patterns are read: write modules' names in place of patterns"
        )
    return [ModuleValue(_matcher(name, key), value) for name, value in table.items()]


def _matcher(name: str, key: str) -> Callable[[str], bool]:
    if PLAIN.fullmatch(name) is None:
        try:
            return compile_pattern(rf"^(?:.*\.)?(?:{name})$")
        except PatternFault as fault:
            raise _fault(f"has {echo(name)} in its {key}, which {fault}; write modules' names in its place") from None
    end = name.removeprefix("^").removesuffix("$").replace("\\.", ".")
    suffix = "" if name.startswith("^") else f".{end}"
    return lambda module: module == end or (suffix != "" and module.endswith(suffix))


def _by_pattern(entries: list[ModuleValue], module: str, default: object) -> object:
    """Returns the value of the first entry for the module."""
    return next((entry.value for entry in entries if entry.matches(module)), default)


def _places(module: str, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.intp]]:
    """Returns the model's own matrices that a module stands for, with the indices of their outputs in it."""
    name = f"{local_name(module)}."
    family = find_model(model.architecture)
    for part, ours in getattr(family, "RENAMES", ()):
        name = name.replace(part, ours)
    if f"{name}weight" not in shapes:  # Kimi Linear's checkpoints call the delta rule self_attn, too
        delta = name.replace(".forget_gate.", ".").replace(".self_attn.", ".linear_attn.")
        name = delta if f"{delta}weight" in shapes else name
    names = [name.removesuffix(".")]
    *before, last = names[0].split(".")
    if f"{names[0]}.weight" not in shapes:
        names = [".".join((*before, part)) for part in STACKED.get(last, ())]
    if not names or not all(_may_change(name, shapes) for name in names):
        raise _fault(f"changes {echo(module)}, which this model does not have, or for which adapters are not supported")
    if model.has_gate and len(names) == 1:  # queries and gates of each head in turn
        stored = Stored(f"{names[0]}.weight", (0, 0), "F32", np.empty(0, np.uint8))
        pieces = {piece.name.removesuffix(".weight"): piece.row_order for piece in family.apart(stored, model)}
        if len(pieces) > 1:
            return {name: np.asarray(rows) for name, rows in pieces.items()}
    ends = np.cumsum([shapes[f"{name}.weight"][0] for name in names])
    return dict(zip(names, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))


def _may_change(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Says whether a weight is that of a linear layer of attention, or of an mlp that every token uses."""
    is_routed = ".experts." in name or name.endswith((".mlp.gate", ".shared_expert_gate"))
    return len(shapes.get(f"{name}.weight", ())) == 2 and ".layers." in name and not is_routed


def _factors(file: SafetensorsFile, part: ModuleTensors) -> Adapter:
    """Returns the factors by the model's own matrices."""
    down, up = (
        to_float32(Stored(info.name, info.shape, info.encoding.name, file.raw(info))) for info in (part.down, part.up)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        up *= np.float32(part.scale)
    for info, values in ((part.down, down), (part.up, up)):
        if not np.isfinite(values).all():
            raise _fault(f"has the tensor {echo(info.name)}, which has non-finite numbers")
    return {name: Factors(down, up[rows]) for name, rows in part.places.items()}


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"the adapter {what}", field="lora_path", code="invalid_adapter")
