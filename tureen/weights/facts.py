"""Counts a model's parameters and finds their quantisation, from the headers of its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from tureen.errors import StartupError
from tureen.weights.mapped import TensorInfo
from tureen.weights.safetensors import SafetensorsFile, weight_files
from tureen.weights.source import ModelSource

FILE_TYPES: Final = (
    "F32", "F16", "Q4_0", "Q4_1", "", "", "", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S",
    "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",
    "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "MXFP4_MOE",
)  # fmt: skip
"""Names of llama.cpp's types of GGUF files, by their number in `general.file_type`."""

PACKED: Final = ("U8", "I8", "U16", "I16", "U32", "I32", "F4")
"""Encodings in which safetensors pack several quantised numbers into one element, or may do so."""


class FileFacts(NamedTuple):
    """Facts about the weights of a model."""

    num_parameters: int = 0  # 0 = unknown, as the numbers are packed
    quantization: str = ""  # the type of most weights; "" = unknown


def file_facts(source: ModelSource) -> FileFacts:
    """Returns the facts about a model's files; unknown ones if the files cannot be read."""
    try:
        if source.format == "gguf":
            return _gguf_facts(source)
        tensors = [tensor for path in weight_files(source.path) for tensor in SafetensorsFile(path).tensors.values()]
        language = FileFacts() if source.gguf is None else _gguf_facts(source)
    except (StartupError, OSError):
        return FileFacts()
    encoding = _commonest(tensors)
    if encoding in PACKED:
        return FileFacts(0, language.quantization or encoding)
    count = language.num_parameters + sum(tensor.num_elements for tensor in tensors)
    return FileFacts(count, language.quantization or encoding)


def _gguf_facts(source: ModelSource) -> FileFacts:
    gguf = source.gguf
    assert gguf is not None
    number = gguf.metadata.get("general.file_type")
    name = FILE_TYPES[number] if isinstance(number, int) and 0 <= number < len(FILE_TYPES) else ""
    tensors = list(gguf.tensors.values())
    vision = () if source.projector is None else source.projector.tensors.values()
    count = sum(tensor.num_elements for tensor in (*tensors, *vision))
    return FileFacts(count, name or _commonest(tensors))


def _commonest(tensors: Iterable[TensorInfo]) -> str:
    """Returns the name of the encoding of most elements; "" without tensors."""
    counts = Counter[str]()
    for tensor in tensors:
        counts[tensor.encoding.name] += tensor.num_elements
    return next((name for name, _ in counts.most_common(1)), "")
