"""Encoders from GGUF files, against the transformers model and the tokenizers that they were converted from."""

from __future__ import annotations

import itertools
import re
import warnings
from types import SimpleNamespace

import mutated
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import quants
from real_app import RealApp
from tiny_gguf import CONTROL, NORMAL, byte_vocabulary, write_gguf

from tureen.errors import StartupError
from tureen.requests.pairs import Pair, prompt_of
from tureen.text.tokenizer import from_gguf_metadata
from tureen.weights.gguf_encoders import LAYER_NAMES

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "cat",
    "##s",
    "the",
    "sleep",
    "##ing",
    ",",
    "a",
    "##b",
    "u",
    "東",
]
UNKNOWN = 2
PIECES = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁cat", -3.0), ("s", -4.0), ("▁", -2.0)]
PIECES += [("▁the", -3.5), ("cat", -5.0), ("c", -8.0), ("a", -7.0), ("t", -7.5), ("▁sleep", -4.5), ("ing", -4.0)]
SHAPE = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 80}
BERT = SHAPE | {"vocab_size": len(WORDS), "max_position_embeddings": 40, "type_vocab_size": 2}
XLM = SHAPE | {"vocab_size": len(PIECES), "max_position_embeddings": 42, "type_vocab_size": 1, "pad_token_id": 1}
MODERN = SHAPE | {
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "classifier_pooling": "mean",
}
GEMMA = SHAPE | {
    "num_hidden_layers": 7,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "use_bidirectional_attention": True,
}
FAMILIES = {
    "Bert": ("bert", BERT),
    "XLMRoberta": ("bert", XLM),
    "NomicBert": ("nomic-bert", BERT),
    "ModernBert": ("modern-bert", MODERN),
    "Gemma3Text": ("gemma-embedding", GEMMA),
}
BYTES = ("ModernBert", "Gemma3Text")
"""Families whose test models have bytes as tokens."""
TEXTS = ["cat", "The cats sleep, the cat sleeps", "Übing  東 zzz", "a ab the sleeping cats"]
POOLINGS = {"mean": 1, "cls": 2}
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
    "pooler.dense": "cls",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "attn_norm": "attn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "mlp_norm": "ffn_norm",
    "final_norm": "output_norm",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_norm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Transformers' names -> llama.cpp's."""


def _model(family, kind="Model", **changes):
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(**(FAMILIES[family][1] | changes))
        model = getattr(transformers, f"{family}{kind}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model


def _wordpiece_metadata():
    types = [CONTROL] * 5 + [NORMAL] * (len(WORDS) - 5)
    words = [word[2:] if word.startswith("##") else f"▁{word}" for word in WORDS[5:]]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [*WORDS[:5], *words],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }


def _unigram_metadata():
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in PIECES],
        "tokenizer.ggml.scores": [score for _, score in PIECES],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(PIECES) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }


def _tensors(model, family):
    """The weights as llama.cpp's converter writes them: q, k, v of Nomic BERT in one, no positions of padding."""
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    tensors = {}
    for name, array in state.items():
        stem, kind = re.sub(r"^(bert|roberta|model)\.", "", name).rsplit(".", 1)
        layer = re.match(r"(?:encoder\.layer|layers)\.(\d+)\.(.*)", stem)
        own = layer[2] if layer else stem
        if family == "Gemma3Text":
            array = array + 1 if own.endswith("norm") else array
            own = "post_attention_norm" if own == "post_attention_layernorm" else own
        elif own.startswith("self_attn") and own != "self_attn.o_proj":
            if own == "self_attn.q_proj":
                parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                tensors[f"blk.{layer[1]}.attn_qkv.{kind}"] = np.concatenate(parts)
            continue
        if own == "embeddings.position_embeddings" and family == "XLMRoberta":
            array = array[2:]
        if own.endswith("position_ids") or (own == "pooler.dense" and f"classifier.{kind}" not in state):
            continue
        tensors[f"blk.{layer[1]}.{NAMES[own]}.{kind}" if layer else f"{NAMES[own]}.{kind}"] = np.ascontiguousarray(
            array
        )
    return tensors


def _write(path, model, family, pooling, tensors=None):
    architecture, config = FAMILIES[family][0], model.config
    if family in BYTES:
        return write_gguf(path, _metadata_of_bytes(config, family, pooling), tensors or _tensors(model, family))
    facts = {
        "context_length": config.max_position_embeddings - (2 if family == "XLMRoberta" else 0),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.causal": False,
        "pooling_type": pooling,
    }
    if architecture == "nomic-bert":
        facts["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    vocabulary = _unigram_metadata() if family == "XLMRoberta" else _wordpiece_metadata()
    metadata = {"general.architecture": architecture, **vocabulary}
    metadata |= {f"{architecture}.{key}": value for key, value in facts.items()}
    return write_gguf(path, metadata, tensors or _tensors(model, family))


def _metadata_of_bytes(config, family, pooling):
    """The metadata of a model whose tokens are bytes, from [1] to [2]."""
    is_gemma = family == "Gemma3Text"
    theta = {kind: parameters["rope_theta"] for kind, parameters in config.rope_parameters.items()}
    facts = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.sliding_window": GEMMA["sliding_window"] if is_gemma else config.local_attention,
        "attention.sliding_window_pattern": 6 if is_gemma else MODERN["global_attn_every_n_layers"],
        "rope.freq_base": float(theta["full_attention"]),
        "rope.freq_base_swa": float(theta["sliding_attention"]),
        "pooling_type": pooling,
    }
    if is_gemma:
        facts |= {
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        }
    else:
        facts |= {"attention.layer_norm_epsilon": config.norm_eps, "attention.causal": False}
        facts |= {"rope.scaling.type": "none", "hidden_activation": config.hidden_activation}
    architecture = FAMILIES[family][0]
    added = dict.fromkeys(("add_bos_token", "add_eos_token", *(() if is_gemma else ("add_sep_token",))), True)
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in facts.items()},
        **byte_vocabulary(),
        **{f"tokenizer.ggml.{key}": value for key, value in added.items()},
    }


def _bytes(text):
    return list(text.encode().replace(b" t", b"\xff"))


def _ids(family, text):
    return [1, *_bytes(text), 2] if family in BYTES else _tokenizer(family).encode(text).ids


def _tokenizer(family):
    """The tokenizer that the file's was made of, by the package tokenizers."""
    if family != "XLMRoberta":
        return tokenizers.BertWordPieceTokenizer({word: number for number, word in enumerate(WORDS)}, lowercase=True)
    fast = transformers.XLMRobertaTokenizer(vocab=[*PIECES, ("<mask>", 0.0)])
    return fast.backend_tokenizer


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_token_ids_are_those_of_the_tokenizer_that_was_converted(family):
    metadata = _wordpiece_metadata() if family == "Bert" else _unigram_metadata()
    arrays = {name: np.array(value) for name, value in metadata.items() if name.endswith(("token_type", "scores"))}
    ours, theirs = from_gguf_metadata(metadata | arrays), _tokenizer(family)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        pair = theirs.encode(text, "the cat")
        ids, start = ours.encode_pair(text, "the cat")
        assert ids == pair.ids
        assert start == (pair.type_ids.index(1) if family == "Bert" else 0)


def test_a_pair_that_is_cut_is_what_transformers_makes_of_the_whole_pair():
    metadata = _wordpiece_metadata()
    ours = from_gguf_metadata(metadata | {"tokenizer.ggml.token_type": np.array(metadata["tokenizer.ggml.token_type"])})
    backend = tokenizers.Tokenizer.from_str(_tokenizer("Bert").to_str())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    texts = ["cat", "a " * 40, "sleeping " * 90, "zzzzzzzzzz " * 60, "zzzzzzzzzz " * 59 + "a " * 250, "u " * 300]
    wrong = []
    for first, second, limit in itertools.product(texts, texts, (8, 9, 40)):
        expected = theirs(first, second, truncation=True, max_length=limit)["input_ids"]
        if prompt_of(Pair(first, second), limit, SimpleNamespace(tokenizer=ours)).token_ids != expected:
            wrong.append((first[:20], second[:20], limit))
    assert wrong == []


def test_the_case_of_a_vocabulary_with_capitals_is_kept():
    metadata = _wordpiece_metadata()
    metadata["tokenizer.ggml.tokens"][5] = "▁Cat"
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"])
    assert from_gguf_metadata(metadata).encode("Cat cat")[1:3] == [5, 1]


def test_a_map_of_characters_that_is_none_is_refused():
    metadata = _unigram_metadata() | {"tokenizer.ggml.precompiled_charsmap": np.array([1, 2, 3], np.uint8)}
    arrays = {name: np.array(value) for name, value in metadata.items() if name.endswith(("token_type", "scores"))}
    with pytest.raises(StartupError, match="corrupt"):
        from_gguf_metadata(metadata | arrays)


@torch.no_grad()
def _expected(model, family, text, pooling):
    ids = torch.tensor([_ids(family, text)])
    states = model(ids).last_hidden_state[0]
    vector = states.mean(dim=0) if pooling == "mean" else states[0]
    return (vector / vector.norm()).numpy()


def _is_near(app, model, family, pooling):
    data = app.post("/v1/embeddings", input=TEXTS).json()["data"]
    expected = [_expected(model, family, text, pooling) for text in TEXTS]
    return all(np.abs(np.array(one["embedding"]) - each).max() < 2e-5 for one, each in zip(data, expected, strict=True))


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        ("Bert", "cls"),
        ("XLMRoberta", "cls"),
        ("NomicBert", "mean"),
        ("ModernBert", "cls"),
        ("Gemma3Text", "mean"),
    ],
)
def test_an_embedding_is_that_of_the_model_that_was_converted(family, pooling, kernels, tmp_path):
    model = _model(family)
    path = _write(tmp_path / "m.gguf", model, family, POOLINGS[pooling])
    with RealApp(path, kernels=kernels, max_total_tokens=None) as app:
        assert _is_near(app, model, family, pooling)


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0, Type.Q4_0])
def test_a_quantised_file_is_computed_with_the_values_that_its_blocks_stand_for(kind, tmp_path):
    model = _model("Bert", hidden_size=64, intermediate_size=96)
    tensors = _tensors(model, "Bert")
    blocks = {name: quants.quantize(array, kind) for name, array in tensors.items() if array.ndim == 2}
    path = _write(
        tmp_path / "m.gguf", model, "Bert", 1, tensors | {name: (rows, kind) for name, rows in blocks.items()}
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and not name.startswith("pooler."):
                parameter.copy_(torch.from_numpy(quants.dequantize(quants.quantize(parameter.numpy(), kind), kind)))
    with RealApp(path, max_total_tokens=None) as app:
        assert _is_near(app, model, "Bert", "mean")


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_in_any_tensor_but_the_bias_of_keys_is_noticed(family, tmp_path):
    model = _model(family)
    tensors = _tensors(model, family)
    unnoticed = []
    for kind in mutated.kinds(tensors):
        noisy = {
            name: mutated.with_noise(array) if mutated.kind(name) == kind else array for name, array in tensors.items()
        }
        with RealApp(_write(tmp_path / "m.gguf", model, family, 1, noisy), max_total_tokens=None) as app:
            if _is_near(app, model, family, "mean"):
                unnoticed.append(kind)
    assert unnoticed == (["blk.*.attn_k.bias"] if FAMILIES[family][0] == "bert" else [])
    assert set(LAYER_NAMES) >= {name.split(".")[2] for name in tensors if name.startswith("blk.")}


@pytest.mark.parametrize("has_bias", [False, True])
def test_dense_layers_of_embeddinggemma_follow_the_pooling(has_bias, tmp_path, caplog):
    model, rng = _model("Gemma3Text"), np.random.default_rng(0)
    first, second = rng.standard_normal((60, 48), np.float32), rng.standard_normal((48, 60), np.float32)
    bias = rng.standard_normal(60, np.float32)
    dense = {"dense_2.weight": first, "dense_3.weight": second} | ({"dense_2.bias": bias} if has_bias else {})
    path = _write(tmp_path / "m.gguf", model, "Gemma3Text", 1, _tensors(model, "Gemma3Text") | dense)
    with RealApp(path, max_total_tokens=None) as app, torch.no_grad():
        [one] = app.post("/v1/embeddings", input=["cat"]).json()["data"]
        pooled = model(torch.tensor([_ids("Gemma3Text", "cat")])).last_hidden_state[0].mean(dim=0).numpy()
    vector = second @ (first @ pooled + (bias if has_bias else 0))
    assert np.abs(np.array(one["embedding"]) - vector / np.linalg.norm(vector)).max() < 2e-5
    assert "dense layers" not in caplog.text


def test_a_file_of_embeddinggemma_without_its_dense_layers_is_told(tmp_path, caplog):
    path = _write(tmp_path / "m.gguf", _model("Gemma3Text"), "Gemma3Text", 1)
    with RealApp(path, max_total_tokens=None):
        assert "m.gguf lacks the two dense layers of EmbeddingGemma" in caplog.text


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "ModernBert"])
def test_a_reranker_scores_pairs_as_the_model_that_was_converted(family, tmp_path):
    model = _model(family, "ForSequenceClassification", num_labels=1)
    path = _write(tmp_path / "m.gguf", model, family, 4)
    with RealApp(path, max_total_tokens=None) as app, torch.no_grad():
        for document in TEXTS:
            [one] = app.post("/v1/rerank", query="the cat", documents=[document]).json()
            types = {}
            if family == "ModernBert":
                ids = [1, *_bytes("the cat"), 2, *_bytes(document), 2]
            else:
                pair = _tokenizer(family).encode("the cat", document)
                ids, types = pair.ids, {"token_type_ids": torch.tensor([pair.type_ids])} if family == "Bert" else {}
            expected = torch.sigmoid(model(torch.tensor([ids]), **types).logits).item()
            assert one["score"] == pytest.approx(expected, abs=2e-5)
