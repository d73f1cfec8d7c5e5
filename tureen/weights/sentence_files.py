"""Reads the settings of embedding models and rerankers from the files of sentence-transformers. No torch.

modules.json lists the stages that a text passes. A stage's settings are in the config.json of its folder.
sentence_bert_config.json has the length that the model was trained with, config_sentence_transformers.json the prompts.
A setting that changes the result and is not known is an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from tureen.contract.types import Classifier, Pooling, ScoreActivation
from tureen.errors import StartupError, echo
from tureen.files import read_regular

STAGES: Final = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
POOLINGS: Final[dict[str, Pooling]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
POOLING_KEYS: Final = ("word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode")
LENGTH_KEYS: Final = (
    "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name", "unpad_inputs",
    "model_args", "tokenizer_args", "config_args", "model_kwargs", "processor_kwargs", "config_kwargs",
    "processing_kwargs",
)  # fmt: skip
PROMPT_KEYS: Final = (
    "__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name", "activation_fn",
)  # fmt: skip
DENSE_KEYS: Final = ("in_features", "out_features", "bias", "activation_function", "module_input_name")
LOGIT_KEYS: Final = ("true_token_id", "false_token_id", "module_input_name")
SIMILARITIES: Final = ("cosine", "dot")
DENSE_ACTIVATIONS: Final = {"Identity": "identity", "Tanh": "tanh"}
SCORE_ACTIVATIONS: Final[dict[str, ScoreActivation]] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}

Similarity = Literal["cosine", "dot"]


class Dense(NamedTuple):
    """A matrix that follows the pooling. Its weights are in `folder`."""

    folder: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str


class SentenceConfig(msgspec.Struct, frozen=True):
    """The way from a text to its vector or its score, as the files describe it."""

    pooling: Pooling | None = None  # None: no file names one
    max_tokens: int | None = None  # with those that the tokenizer adds; None: as many as there are positions
    dense: tuple[Dense, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    answers: tuple[int, int] | None = None  # tokens that mean yes and no; of a reranker that generates them
    activation: str | None = None  # of a cross-encoder's scores


def read_sentence_config(folder: Path) -> SentenceConfig:
    """Reads the settings of a model's folder. Raises StartupError naming the file and the key at fault."""
    modules = _read(folder / "modules.json")
    fields: dict[str, Any] = {}
    dense: list[Dense] = []
    for stage in modules if isinstance(modules, list) else []:
        kind = str(stage.get("type")).rsplit(".", 1)[-1] if isinstance(stage, dict) else ""
        if kind not in STAGES:
            raise StartupError(
                f"model {folder / 'modules.json'}: a stage of type {echo(kind)} is not supported; "
                f"known: {', '.join(STAGES)}"
            )
        own = folder / Path(str(stage.get("path"))).name
        if kind == "Pooling":
            fields["pooling"] = _pooling(own / "config.json")
        elif kind == "Dense":
            dense.append(_dense(own))
        elif kind == "LogitScore":
            fields["answers"] = _answers(own / "config.json")
    return SentenceConfig(
        max_tokens=_max_tokens(folder / "sentence_bert_config.json"),
        dense=tuple(dense),
        **fields,
        **_prompts(folder / "config_sentence_transformers.json"),
    )


def embedding_sizes(hf: Mapping[str, Any], size: int) -> tuple[int, ...]:
    """Returns the sizes to which an embedding of `size` numbers may be cut (arXiv:2205.13147); config.json says it by
    vLLM's names. () = none."""
    sizes = hf.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        return tuple(number for number in sizes if isinstance(number, int) and 1 <= number <= size)
    return tuple(range(1, size + 1)) if hf.get("is_matryoshka") is True else ()


def classifier_of(hf: Mapping[str, Any], sentence: SentenceConfig) -> Classifier:
    """Reads the labels of a classifier and the activations of its scores, by the rules of sentence-transformers'
    CrossEncoder and of transformers. Raises StartupError naming the key at fault."""
    labels = _labels(hf)
    own = hf.get("sentence_transformers")
    name = (own.get("activation_fn") if isinstance(own, dict) else None) or sentence.activation
    name = name or hf.get("sbert_ce_default_activation_function")
    pair: ScoreActivation = "sigmoid" if len(labels) == 1 else "identity"
    if name is not None:
        pair = _activation("config.json: activation_fn", name, SCORE_ACTIVATIONS)
    problem = hf.get("problem_type")
    if problem == "regression":
        return Classifier(labels, pair, "identity")
    is_sigmoid = problem == "multi_label_classification" or len(labels) == 1
    return Classifier(labels, pair, "sigmoid" if is_sigmoid else "softmax")


def _labels(hf: Mapping[str, Any]) -> tuple[str, ...]:
    names = hf.get("id2label")
    if names is None:
        count = hf.get("num_labels", 2)
        names = {str(index): f"LABEL_{index}" for index in range(count if isinstance(count, int) else 0)}
    if not isinstance(names, dict) or not names or sorted(names, key=str) != sorted(map(str, range(len(names)))):
        raise StartupError(
            f"config.json: id2label: must name labels numbered from 0 without gaps, got {echo(names)}", field="id2label"
        )
    return tuple(str(names[str(index)]) for index in range(len(names)))


def _pooling(file: Path) -> Pooling:
    settings = _object(file, (*POOLING_KEYS, "pooling_mode_"))
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    newer = settings.get("pooling_mode")  # newer files name the one
    if newer is not None:
        modes = [f"pooling_mode_{newer}" + {"cls": "_token", "lasttoken": ""}.get(str(newer), "_tokens")]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise StartupError(
            f"model {file}: it asks for {echo(', '.join(modes) or 'no pooling')}; supported are {', '.join(POOLINGS)}"
        )
    if settings.get("include_prompt") is False:
        raise _fault(file, "include_prompt", "false is not supported: prompts count in the pooling here")
    return POOLINGS[modes[0]]


def _dense(folder: Path) -> Dense:
    file = folder / "config.json"
    settings = _object(file, DENSE_KEYS)
    for key in ("in_features", "out_features"):
        if not isinstance(settings.get(key), int) or settings[key] < 1:
            raise _fault(file, key, f"must be at least 1, got {echo(settings.get(key))}")
    if settings.get("module_input_name") not in (None, "sentence_embedding"):
        raise _fault(file, "module_input_name", f"{echo(settings['module_input_name'])} is not supported")
    name = settings.get("activation_function") or "Tanh"
    activation = _activation(f"model {file}: activation_function", name, DENSE_ACTIVATIONS)
    return Dense(
        folder, settings["in_features"], settings["out_features"], settings.get("bias") is not False, activation
    )


def _answers(file: Path) -> tuple[int, int]:
    settings = _object(file, LOGIT_KEYS)
    ids = settings.get("true_token_id"), settings.get("false_token_id")
    for key, token_id in zip(LOGIT_KEYS, ids, strict=False):
        if not isinstance(token_id, int) or token_id < 0:
            raise _fault(file, key, f"must be a token id, got {echo(token_id)}")
    return ids  # type: ignore[return-value] # both are numbers


def _max_tokens(file: Path) -> int | None:
    settings = _object(file, LENGTH_KEYS)
    if settings.get("do_lower_case") is True:
        raise _fault(file, "do_lower_case", "true is not supported: only the tokenizer converts to lower case")
    value = settings.get("max_seq_length")
    return value if isinstance(value, int) and value > 0 else None


def _prompts(file: Path) -> dict[str, Any]:
    """Returns the fields of SentenceConfig that config_sentence_transformers.json tells."""
    settings = _object(file, PROMPT_KEYS)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise _fault(file, "prompts", f"must map names to texts, got {echo(prompts)}")
    if default is not None and default not in prompts:
        raise _fault(file, "default_prompt_name", f"must be one of {', '.join(prompts)}, got {echo(default)}")
    similarity = settings.get("similarity_fn_name") or SIMILARITIES[0]
    if similarity not in SIMILARITIES:
        raise _fault(file, "similarity_fn_name", f"must be one of {', '.join(SIMILARITIES)}, got {echo(similarity)}")
    activation = settings.get("activation_fn")
    return {
        "prompts": prompts, "default_prompt": default, "similarity": similarity, "activation": activation,
    }  # fmt: skip


def _activation(where: str, name: object, known: Mapping[str, Any]) -> Any:
    """Returns what `known` has for the last part of a class's name."""
    last = str(name).rsplit(".", 1)[-1].removesuffix("()")
    if last not in known:
        raise StartupError(f"{where}: must be one of {', '.join(known)}, got {echo(name)}")
    return known[last]


def _object(file: Path, known: Collection[str]) -> dict[str, Any]:
    """Reads a JSON object; {} where there is no such file. Raises StartupError for a key whose beginning or whole is
    not in `known`, unless it is empty."""
    settings = _read(file)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise StartupError(f"model {file}: must hold a JSON object; download the model again")
    beginnings = tuple(name for name in known if name.endswith("_"))
    for key, value in settings.items():
        if key not in known and not (beginnings and key.startswith(beginnings)) and value not in (None, "", {}, []):
            raise _fault(file, key, f"is unknown and may change the result; got {echo(value)}")
    return settings


def _fault(file: Path, key: str, what: str) -> StartupError:
    return StartupError(f"model {file}: {key}: {what}", field=key)


def _read(file: Path) -> Any:
    """Reads a JSON file; None where there is no such file."""
    try:
        return json.loads(read_regular(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StartupError(f"model {file}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StartupError(f"model {file}: not valid JSON; download the model again") from None
