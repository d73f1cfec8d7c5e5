"""Tokenizers from folders and from GGUF metadata, against BPE and SentencePiece written out in plain Python."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import regex
import tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from toy_tokenizer import BOS, CHAR_OF_BYTE, IM_END, make_toy_tokenizer
from transformers import GemmaTokenizer

from tureen.contract.params import SamplingParams
from tureen.errors import InvalidRequest, StartupError
from tureen.text.detokenizer import Detokenizer
from tureen.text.gguf_vocab import CONTROL, NORMAL, end_token_ids
from tureen.text.pre_tokenizers import pre_tokenizer
from tureen.text.tokenizer import Tokenizer, from_folder, from_gguf_metadata
from tureen.weights.gguf import GgufFile
from tureen.weights.source import load_tokenizer

TEXTS = (
    "Hello  2018",
    "in  2018-01-22\n\n12:1",
    "3.14159 1,234,567 0x1F a1b22c333 ２０１８ ٣٤",
    "  two leading, three trailing   ",
    "a    run of    spaces\tand\t\ttabs",
    "line\nline\n\nline\r\n\r\n\n   \n end",
    "😀👩‍👩‍👧‍👦 🇫🇷 e\u0301 ñ ß İ",
    "日本語のテキスト、你好，世界。한국어 ภาษาไทย",
    "don't DON'T we'll I'VE it's'",
    "def f(x):\n    return x ** 2  # comment!?\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "🦄\u200b\ufeff\u00a0nbsp",
    "",
    " ",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_like_smollm(text):
    return [word for part in regex.findall(r"\p{N}|\P{N}+", text) for word in regex.findall(GPT2, part)]


SPLITS = {
    "gpt-2": lambda text: regex.findall(GPT2, text),
    "smollm": _split_like_smollm,
    "llama-bpe": lambda text: regex.findall(LLAMA3, text),
    "qwen2": lambda text: regex.findall(LLAMA3.replace("{1,3}", ""), text),
    "tekken": lambda text: regex.findall(TEKKEN, text),
}


def _as_byte_level(text):
    return "".join(CHAR_OF_BYTE[byte] for byte in text.encode())


def _bpe(word, ranks):
    parts = list(word)
    while True:
        pairs = [(ranks.get(pair, 1 << 30), at) for at, pair in enumerate(itertools.pairwise(parts))]
        rank, at = min(pairs, default=(1 << 30, 0))
        if rank == 1 << 30:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_into_words_as_the_model_was_trained(pre):
    split = pre_tokenizer(pre)
    for text in TEXTS:
        assert [word for word, _ in split.pre_tokenize_str(text)] == [_as_byte_level(w) for w in SPLITS[pre](text)]


# the default model


@pytest.fixture(scope="module")
def default_metadata(default_model_source):
    return dict(GgufFile(default_model_source.path).metadata)


@pytest.fixture(scope="module")
def default_tokenizer(default_metadata):
    return from_gguf_metadata(default_metadata)


@pytest.mark.model
def test_digits_of_the_default_model_are_split_as_in_training(default_tokenizer):
    assert default_tokenizer.encode("Hello  2018") == [19556, 256, 34, 32, 33, 40]
    assert 1116 in default_tokenizer.encode("in  2018-01-22\n\n12:1")


@pytest.mark.model
def test_ids_of_the_default_model_equal_bpe_in_plain_python(default_tokenizer, default_metadata):
    tokens = default_metadata["tokenizer.ggml.tokens"]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(default_metadata["tokenizer.ggml.merges"])}
    specials = "|".join(regex.escape(tokens[i]) for i in default_tokenizer.special_ids)
    for text in TEXTS:
        expected = []
        for part in regex.split(f"({specials})", text):
            words = [part] if regex.fullmatch(specials, part) else None
            expected += words or [t for w in _split_like_smollm(part) for t in _bpe(_as_byte_level(w), ranks)]
        assert default_tokenizer.encode(text) == [ids[token] for token in expected]
        assert default_tokenizer.decode(default_tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_bytes_of_all_tokens_at_once_are_those_of_each():
    alphabet = "".join(CHAR_OF_BYTE.values())
    odd = ["中", "Ġa", "a b", "Ċ", "𝄞", "é", "Ġ中", "\n", alphabet]
    texts = [*alphabet, *(one for one in odd if one not in alphabet)]
    for extra in ([], ["zero\0byte"]):
        backend = Backend(models.BPE({text: token_id for token_id, text in enumerate([*texts, *extra])}, []))
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<|Ġ|>", special=True)])
        tokenizer = Tokenizer(backend)
        byte_of = {char: byte for byte, char in CHAR_OF_BYTE.items()}
        known = [*texts, *extra]
        expected = [bytes(map(byte_of.__getitem__, one)) if set(one) <= set(byte_of) else one.encode() for one in known]
        assert tokenizer.all_token_bytes() == [*expected, "<|Ġ|>".encode()]
        assert tokenizer.token_bytes(0) == expected[0]


@pytest.mark.model
def test_every_single_token_of_the_default_model_decodes_to_its_bytes(default_tokenizer, default_metadata):
    byte_of = {char: byte for byte, char in CHAR_OF_BYTE.items()}
    together = default_tokenizer.all_token_bytes()
    for token_id, token in enumerate(default_metadata["tokenizer.ggml.tokens"]):
        is_special = token_id in default_tokenizer.special_ids
        stored = token.encode() if is_special else bytes(byte_of[char] for char in token)
        assert default_tokenizer.token_bytes(token_id) == stored == together[token_id]
        assert default_tokenizer.token_text(token_id) == default_tokenizer._backend.decode([token_id], False)
        assert default_tokenizer.token_id(token) == token_id


@pytest.mark.model
def test_the_default_model_ends_at_both_of_its_end_tokens(default_tokenizer):
    assert default_tokenizer.eos_token_ids == (0, 2)
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.vocab_size == 49152
    assert "<|im_start|>" in default_tokenizer.chat_template
    assert default_tokenizer.encode("x", add_special_tokens=True) == default_tokenizer.encode(
        "x", add_special_tokens=False
    )


@pytest.mark.model
def test_a_tokenizer_json_takes_the_place_of_the_models_own(default_model_source, tmp_path):
    make_toy_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(default_model_source, str(path)).vocab_size == BOS + 1
    with pytest.raises(StartupError, match="--tokenizer-path"):
        load_tokenizer(default_model_source, str(tmp_path / "nothing"))


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_of_the_default_model_is_the_whole_text(default_tokenizer, text):
    detokenizer = Detokenizer(default_tokenizer, SamplingParams(skip_special_tokens=False, stop=("\n\nUser", "1")))
    taken = ""
    for token_id in default_tokenizer.encode(text):
        assert detokenizer.append(token_id, stops_allowed=False) is None
        taken += detokenizer.take()
        assert text.startswith(taken)
    assert taken + detokenizer.close() == text


# SentencePiece


def _sentencepiece_metadata(**changes):
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["▁t", "he", "▁the", "in", "▁▁", "an", "▁an", "the", "▁a", "aa", "aab", "ab", "▁h", "日本"]
    pieces += [(word, -1.0 - rank, 1) for rank, word in enumerate(words)]
    pieces += [(char, -100.0 - at, 1) for at, char in enumerate("▁abehintx日本é")]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": np.array([score for _, score, _ in pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([kind for _, _, kind in pieces], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _sentencepiece(text, metadata, prefix):
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    parts = list((("▁" if prefix else "") + text.replace(" ", "▁")) if text else "")
    while True:
        scored = [
            (-metadata["tokenizer.ggml.scores"][ids[parts[at] + parts[at + 1]]], at)
            for at in range(len(parts) - 1)
            if parts[at] + parts[at + 1] in ids
        ]
        if not scored:
            break
        at = min(scored)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    as_bytes = [[ids[part]] if part in ids else [3 + byte for byte in part.encode()] for part in parts]
    return [token_id for part in as_bytes for token_id in part]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(" abehintx日本éß😀\n", max_size=30), st.sampled_from(TEXTS)), st.booleans())
def test_sentencepiece_ids_equal_those_of_its_algorithm(text, prefix):
    metadata = _sentencepiece_metadata(add_space_prefix=prefix)
    tokenizer = from_gguf_metadata(metadata)
    if not any(name in text for name in ("<unk>", "<s>", "</s>")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == _sentencepiece(text, metadata, prefix)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode([1, *ids]) == text == tokenizer._backend.decode(ids)


LISTED_MERGES = ["a b", "a a", "aa b", "h e", "▁ ▁", "i n", "t he", "▁ t", "▁ a", "▁t he", "▁a n", "日 本", "▁ h"]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(" abehintx日本éß😀\n", max_size=30), st.sampled_from(TEXTS)))
def test_sentencepiece_ids_of_a_file_that_lists_its_merges_are_those_of_transformers(text):
    metadata = _sentencepiece_metadata(model="gemma4", add_space_prefix=False, merges=LISTED_MERGES)
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split()) for merge in LISTED_MERGES]
    tokenizer = from_gguf_metadata(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    oracle = GemmaTokenizer(vocab, merges, bos_token="<s>", eos_token="</s>", pad_token="<s>", mask_token="<s>")
    assert ids == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == text


def test_an_output_of_gemma_4_ends_with_its_turn_or_a_call_whatever_the_types_of_these_tokens():
    metadata = _sentencepiece_metadata(model="gemma4", merges=LISTED_MERGES)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("▁the")], tokens[tokens.index("日本")] = "<turn|>", "<|tool_response>"
    ends = end_token_ids(metadata)
    assert ends == (2, tokens.index("<turn|>"), tokens.index("<|tool_response>"))


@pytest.mark.parametrize("token", ["<0x0A>", "<0xe9>", "<0xZZ>", "<0x+1>", "<0x 1>", "<0x0A)", "<0x1>", "<0X41>"])
def test_only_a_token_that_names_a_byte_stands_for_it(token):
    backend = Backend(models.BPE({token: 0, "a": 1}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    assert (tokenizer.token_bytes(0) + b"a").decode("utf-8", "replace") == backend.decode([0, 1])
    assert tokenizer.all_token_bytes() == [tokenizer.token_bytes(0), b"a"]


def test_a_sentencepiece_token_keeps_its_space_in_running_text():
    tokenizer = from_gguf_metadata(_sentencepiece_metadata())
    the = tokenizer.token_id("▁the")
    assert tokenizer.token_text(the) == " the"
    assert tokenizer.decode([the, the]) == "the the"
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"


def test_the_first_output_token_keeps_its_space_and_bytes_become_characters():
    tokenizer = from_gguf_metadata(_sentencepiece_metadata())
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    taken = []
    for token_id in (tokenizer.token_id("▁the"), *(3 + byte for byte in "😀".encode()), tokenizer.token_id("an")):
        assert detokenizer.append(token_id, stops_allowed=True) is None
        taken.append(detokenizer.take())
    assert [*taken, detokenizer.close()] == [" the", "", "", "", "😀", "an", ""]


def test_bos_is_added_unless_the_metadata_says_no():
    assert from_gguf_metadata(_sentencepiece_metadata(add_bos_token=False)).encode("a")[0] != 1
    byte_level = {key: np.array(v) if key.endswith("type") else v for key, v in tiny_gguf.byte_vocabulary().items()}
    assert from_gguf_metadata(byte_level).encode("a") == [97]
    assert from_gguf_metadata(byte_level | {"tokenizer.ggml.add_bos_token": True}).encode("a") == [1, 97]


def test_eos_is_added_where_the_metadata_says_so_and_the_text_of_a_token_may_hold_colons_and_spaces():
    metadata = _sentencepiece_metadata(add_eos_token=True)
    assert from_gguf_metadata(metadata).encode("a")[:: len(from_gguf_metadata(metadata).encode("a")) - 1] == [1, 2]
    byte_level = {key: np.array(v) if key.endswith("type") else v for key, v in tiny_gguf.byte_vocabulary(300).items()}
    byte_level["tokenizer.ggml.tokens"][257] = "<end: of text>"
    adds_eos = byte_level | {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 257}
    assert from_gguf_metadata(adds_eos).encode("a") == [97, 257]
    assert from_gguf_metadata(adds_eos).encode("a", add_special_tokens=False) == [97]
    assert from_gguf_metadata(adds_eos | {"tokenizer.ggml.add_bos_token": True}).encode("a") == [1, 97, 257]
    assert from_gguf_metadata(byte_level | {"tokenizer.ggml.add_sep_token": True}).encode("a") == [97]


# metadata that cannot be used


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pre": "deepseek-v9"}, "tokenizer.ggml.pre 'deepseek-v9' is not known; take the model's safetensors"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not known"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokens": np.zeros(256)}, "tokenizer.ggml.tokens"),
        ({"tokens": [*tiny_gguf.byte_vocabulary()["tokenizer.ggml.tokens"][:255], "!"], "merges": []}, "not distinct"),
        ({"token_type": np.ones(255, np.int32)}, "tokenizer.ggml.token_type"),
        ({"token_type": None}, "tokenizer.ggml.token_type"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["no such"]}, "corrupt"),
        ({"merges": ["one"]}, "corrupt"),
        ({"merges": ["! !"]}, "corrupt: 'the merge of '!' and '!' makes no token"),
        ({"eos_token_id": 256}, "tokenizer.ggml.eos_token_id must be a token id below 256, got 256"),
        ({"bos_token_id": -1}, "tokenizer.ggml.bos_token_id"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
        ({"tokens": ["x" * 4097] * 256}, "has one of 4097 characters; at most 4096 are taken"),
        (
            {"tokens": ["x" * 4096] * 257, "token_type": np.full(257, 3, np.int32)},
            "special tokens of more than 1048576 characters",
        ),
    ],
)
def test_metadata_that_cannot_be_used_is_named(changes, fault):
    metadata = tiny_gguf.byte_vocabulary()
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    with pytest.raises(StartupError, match=regex.escape(fault)):
        from_gguf_metadata(metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


# folders


def _folder(path, *, tokenizer_config=None, **files):
    backend = make_toy_tokenizer()._backend
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(path / "tokenizer.json"))
    if tokenizer_config is not None:
        files["tokenizer_config"] = tokenizer_config
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("a", "<|endoftext|>", "<|end|>", "<|user|>"), [1, 2]),
        (("a", "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|channel|>"), [1, 2, 4]),
    ],
)
def test_a_message_of_gpt_oss_ends_no_output_but_a_call_does(texts, ends):
    kinds = [NORMAL if text == "a" else CONTROL for text in texts]
    metadata = {"tokenizer.ggml.tokens": list(texts), "tokenizer.ggml.token_type": np.array(kinds)}
    assert list(end_token_ids(metadata | {"tokenizer.ggml.eos_token_id": 1})) == ends


def test_end_tokens_of_a_folder_are_gathered_from_all_its_files(tmp_path):
    folder = _folder(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"},
        generation_config={"eos_token_id": [3, 4]},
        config={"eos_token_id": 5},
    )
    tokenizer = from_folder(folder)
    assert tokenizer.eos_token_ids == (3, 4, 5, IM_END)
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.special_ids == {IM_END, BOS}


def test_add_bos_token_overrules_the_post_processor(tmp_path):
    settings_with = {"bos_token": "<s>", "add_bos_token": True}
    assert from_folder(_folder(tmp_path, tokenizer_config=settings_with)).encode("x") == [BOS, 120]
    assert from_folder(_folder(tmp_path, tokenizer_config={"bos_token": "<s>"})).encode("x") == [120]
    file = tmp_path / "tokenizer.json"
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    assert from_folder(tmp_path).encode("x") == [BOS, 120]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_with | {"add_bos_token": False}))
    assert from_folder(tmp_path).encode("x") == [120]


def test_the_chat_template_file_goes_before_the_setting(tmp_path):
    folder = _folder(tmp_path, tokenizer_config={"chat_template": "from the setting"})
    assert from_folder(folder).chat_template == "from the setting"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert from_folder(_folder(tmp_path, tokenizer_config={"chat_template": several})).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert from_folder(folder).chat_template == "from the file"


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    _folder(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert from_folder(tmp_path).encode("xyz") == [120, 121, 122]


def bpe(merges: list, normalizer: dict | None = None, **more: str) -> str:
    """A tokenizer.json at which the package tokenizers panics."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "é": 2}, "merges": merges, **more}
    return json.dumps({"version": "1.0", "normalizer": normalizer, "model": model})


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("tokenizer.json", "{", "tokenizer.json: cannot be read"),
        ("tokenizer.json", '{"model": {"type": "Nothing"}}', "tokenizer.json: cannot be read"),
        ("tokenizer.json", bpe([["a", "b"]]), "cannot be read: 'the merge of 'a' and 'b' makes no token"),
        ("tokenizer.json", bpe(["a b"]), "cannot be read: 'the merge of 'a' and 'b' makes no token"),
        ("tokenizer.json", bpe([["é", "b"]], continuing_subword_prefix="xy"), "cannot be read: 'the merge of"),
        ("tokenizer.json", bpe([], {"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object"),
        ("tokenizer.json", json.dumps({"added_tokens": [{"content": "x" * 1025}] * 1024}), "have 1049600 characters"),
        ("generation_config.json", "[" * 200_000, "generation_config.json: not valid JSON"),
    ],
)
def test_a_damaged_file_of_a_folder_is_named(tmp_path, name, content, fault):
    (_folder(tmp_path) / name).write_text(content)
    with pytest.raises(StartupError, match=fault):
        from_folder(tmp_path)


def test_a_folder_without_tokenizer_json_names_the_fix(tmp_path):
    with pytest.raises(StartupError, match="--tokenizer-path"):
        from_folder(tmp_path)


def test_a_decoder_that_looks_at_neighbours_is_refused(tmp_path):
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match="'CTC'"):
        from_folder(tmp_path)


def test_text_with_a_lone_surrogate_is_a_request_error():
    with pytest.raises(InvalidRequest, match="surrogate"):
        make_toy_tokenizer().encode("a\ud800")


def test_ids_outside_the_vocabulary_have_no_text():
    tokenizer = make_toy_tokenizer()
    assert tokenizer.decode([97, 5000, -1, 1 << 40, 98]) == "ab"
    assert tokenizer.token_id("no such token") is None


def test_a_special_token_in_latin_letters_keeps_its_accents():
    backend = make_toy_tokenizer()._backend
    backend.add_special_tokens([AddedToken("<é>", special=True)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_text(tokenizer.token_id("<é>")) == "<é>"
