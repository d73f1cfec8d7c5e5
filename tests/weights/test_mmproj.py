"""Tests which mmproj file a GGUF model gets, and that refusals name the key at fault."""

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import tiny_gguf
import tiny_idefics3
import tiny_pixtral
import tiny_qwen_vl
import transformers
from converted_vision import metadata, tensors, write_pair

from tureen.config import Config
from tureen.errors import StartupError
from tureen.fetching.ggufs import Companion
from tureen.media.families import find_family, is_family
from tureen.registry import find_model
from tureen.runner import loading
from tureen.weights.mmproj import find_mmproj
from tureen.weights.source import model_config, open_model, preprocessor_config
from tureen.weights.stored import to_float32
from tureen.weights.vision import iter_vision

TOKENS = {"<|image_pad|>": 250, "[IMG]": 248, "<image>": 249}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
NAME = "mmproj-tiny-f32.gguf"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A transformers model, and the metadata and tensors of its mmproj file."""
    oracle = tiny_qwen_vl.write(tmp_path_factory.mktemp("qwen2.5"), "qwen2.5")
    return oracle, metadata(oracle, tiny_qwen_vl.PREPROCESSOR), tensors(oracle)


@pytest.fixture
def model(qwen, tmp_path):
    """The file of the language model, next to the mmproj file."""
    return write_pair(tmp_path / "m", qwen[0], tiny_qwen_vl.PREPROCESSOR, TOKENS)


def _rewritten(model: Path, facts, found, name=NAME) -> Path:
    return tiny_gguf.write_gguf(model.with_name(name), facts, found)


def _weights(source):
    return {stored.name: to_float32(stored) for stored in iter_vision(source)}


def test_the_only_mmproj_file_next_to_a_model_is_taken_and_the_log_says_so(model):
    found = find_mmproj(model, Config())
    assert found.path == model.with_name(NAME)
    assert found.note == f"tiny.gguf takes pictures with {NAME}, which is next to it"
    assert is_family(model_config(open_model(model, Config())))
    assert open_model(model, Config()).files == [model, model.with_name(NAME)]


def test_language_model_only_takes_none(model):
    config = Config(language_model_only=True, mmproj=str(model.with_name(NAME)))
    assert find_mmproj(model, config) == Companion()
    assert not is_family(model_config(open_model(model, config)))


def test_of_several_files_one_must_be_chosen(model, qwen):
    other = _rewritten(model, *qwen[1:], "mmproj-other.gguf")
    found = find_mmproj(model, Config())
    assert found.path is None
    assert found.is_warning
    assert f"({other.name}, {NAME})" in found.note
    assert f"choose one with --mmproj {other}" in found.note
    assert find_mmproj(model, Config(mmproj=str(other))).path == other


def test_several_files_next_to_a_model_that_none_can_go_with_are_no_matter(model, qwen):
    _rewritten(model, *qwen[1:], "mmproj-other.gguf")
    facts = tiny_gguf.architecture_metadata("gemma2")
    assert find_mmproj(tiny_gguf.write_gguf(model.with_name("g.gguf"), facts), Config()).note == ""


def test_the_mmproj_file_of_a_hubs_snapshot_goes_with_models_in_its_folders(model):
    snapshot = model.parent.parent / "snapshots" / ("c" * 40)
    (snapshot / "Q8_0").mkdir(parents=True)
    file = snapshot / NAME
    model.with_name(NAME).rename(file)
    assert find_mmproj(model.rename(snapshot / "Q8_0" / "tiny.gguf"), Config()).path == file


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"general.architecture": "llama"}, "its general.architecture is 'llama', not clip: it is not an mmproj file"),
        ({"clip.projector_type": "resampler"}, "clip.projector_type 'resampler' is not supported; these are: qwen2vl_"),
        ({"clip.projector_type": None}, "clip.projector_type null is not supported"),
        ({"clip.projector_type": [1.0, 2.0]}, "differs from layer to layer"),
        ({"clip.projector_type": 7}, "clip.projector_type 7 is not supported"),
        (
            {"clip.projector_type": "idefics3"},
            "clip.projector_type idefics3 is for models of the architecture llama, and the model's is qwen2vl",
        ),
        ({"clip.vision.projection_dim": 96}, "clip.vision.projection_dim 96 is not the model's qwen2vl.embedding_le"),
    ],
)
def test_a_file_that_does_not_belong_to_the_model_is_refused_if_it_was_asked_for(model, qwen, changes, why):
    _, facts, found = qwen
    path = _rewritten(model, {key: value for key, value in (facts | changes).items() if value is not None}, found)
    with pytest.raises(StartupError, match=r"--language-model-only|differs") as fault:
        find_mmproj(model, Config(mmproj=str(path)))
    assert why in fault.value.message
    if "differs" not in why:
        near = find_mmproj(model, Config())
        assert (near.path, near.is_warning) == (None, True)
        assert why in near.note


def test_a_model_without_the_token_for_pictures_takes_none(qwen, tmp_path):
    model = write_pair(tmp_path / "m", qwen[0], tiny_qwen_vl.PREPROCESSOR, {})
    assert "tokenizer.ggml.tokens has no <|image_pad|>" in find_mmproj(model, Config()).note


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, None])
def test_a_damaged_file_is_refused_with_a_way_out(model, content):
    path = model.with_name(NAME)
    path.write_bytes(path.read_bytes()[:4000] if content is None else content)
    with pytest.raises(StartupError, match=f"mmproj file {path}: .*--language-model-only"):
        find_mmproj(model, Config(mmproj=str(path)))
    found = find_mmproj(model, Config())  # one that only lies there
    assert found.path is None
    assert found.is_warning
    assert f"is not used with {model.name}: mmproj file {path}" in found.note


def test_a_file_that_is_not_there_is_named(model):
    with pytest.raises(StartupError, match=r"mmproj file .*lost\.gguf: there is no such file.*--language-model-only"):
        find_mmproj(model, Config(mmproj=str(model.with_name("lost.gguf"))))


def test_a_folder_of_safetensors_takes_no_mmproj_file(tmp_path):
    tiny_qwen_vl.write(tmp_path, "qwen2.5")
    with pytest.raises(StartupError, match=r"--mmproj x\.gguf: is for GGUF models only"):
        open_model(tmp_path, Config(mmproj="x.gguf"))


def _read_all(source) -> None:
    hf = model_config(source)
    vision = find_model(loading.architecture_of(hf)).parse_vision(hf)
    find_family(hf, preprocessor_config(source))
    shapes = vision.weights(64)
    for stored in iter_vision(source):
        assert shapes[vision.local_name(stored.name)] == stored.shape
        to_float32(stored)


def _pair(model):
    """The model with its mmproj file, which is named."""
    return open_model(model, Config(mmproj=str(model.with_name(NAME))))


def _refused(model) -> str:
    source = _pair(model)
    with pytest.raises(StartupError) as fault:
        _read_all(source)
    assert NAME in fault.value.message
    return fault.value.message


def test_a_refusal_by_a_key_says_how_to_serve_text_alone(model, qwen):
    _rewritten(model, qwen[1] | {"clip.tomorrow": 1}, qwen[2])
    assert _refused(model).endswith(", or serve text alone with --language-model-only")


def test_a_neighbour_with_a_key_that_is_refused_does_not_stop_a_text_model(model, qwen):
    _rewritten(model, qwen[1] | {"clip.tomorrow": 1}, qwen[2])
    source = open_model(model, Config())
    assert not is_family(model_config(source))
    assert (source.mmproj.path, source.mmproj.is_warning) == (None, True)
    assert "clip.tomorrow is unknown" in source.mmproj.note


def test_a_model_that_takes_no_mmproj_file_does_not_look_into_one(model):
    model.with_name(NAME).write_bytes(b"half of it")
    text = tiny_gguf.write_gguf(model.with_name("g.gguf"), tiny_gguf.architecture_metadata("gemma2"))
    assert find_mmproj(text, Config()) == Companion()


@pytest.mark.parametrize(
    ("own", "other", "differ"),
    [
        ("Qwen2-VL", "Qwen2.5-VL", True),
        ("Qwen2.5-VL", "Qwen2.5 VL", False),
        ("Qwen2.5-VL-7B", "qwen2.5-vl", False),
        ("Qwen2.5-VL", None, False),
        ("Qwen2.5-VL", 7, False),
    ],
)
def test_files_that_name_different_models_are_told_of_in_the_log(qwen, tmp_path, own, other, differ):
    oracle, facts, found = qwen
    name = {"general.basename": own}
    model = write_pair(tmp_path / "m", oracle, tiny_qwen_vl.PREPROCESSOR, TOKENS, name)
    _rewritten(model, facts if other is None else facts | {"general.basename": other}, found)
    for config in (Config(), Config(mmproj=str(model.with_name(NAME)))):
        companion = find_mmproj(model, config)
        assert companion.path == model.with_name(NAME)
        assert companion.is_warning == differ
        assert (f"the files name different models, '{own}' and '{other}'" in companion.note) == differ


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("has_vision_encoder", False, "clip.has_vision_encoder must be true"),
        ("has_audio_encoder", True, "an audio encoder (clip.has_audio_encoder) is not supported"),
        ("use_gelu", True, "clip.use_gelu and clip.use_silu must be flags, at most one of them true"),
        ("use_silu", 7, "clip.use_gelu and clip.use_silu must be flags"),
        ("vision.embedding_length", 40, "tensor 'v.blk.0.ffn_up.weight' must be a matrix with a side of 40"),
        ("vision.embedding_length", "wide", "clip.vision.embedding_length must be a positive integer, got 'wide'"),
        ("vision.attention.head_count", 5, "clip.vision.embedding_length 32 is not a multiple of attention.head_coun"),
        ("vision.attention.head_count", 0, "clip.vision.attention.head_count must be a positive integer"),
        ("vision.attention.head_count", None, "clip.vision.attention.head_count must be a positive integer, got null"),
        ("vision.block_count", 1 << 20, "clip.vision.block_count must be at most 4096"),
        ("vision.block_count", -1, "clip.vision.block_count must be a positive integer"),
        ("vision.patch_size", None, "clip.vision.patch_size must be a positive integer, got null"),
        ("vision.n_wa_pattern", None, "clip.vision.n_wa_pattern must be a positive integer, got null"),
        ("vision.n_wa_pattern", 0, "clip.vision.n_wa_pattern must be a positive integer, got 0"),
        ("vision.window_size", 1.5, "clip.vision.window_size must be a positive integer, got 1.5"),
        ("vision.image_mean", None, "clip.vision.image_mean must be three numbers, got null"),
        ("vision.image_mean", [0.5, 0.5], "clip.vision.image_mean must be three numbers"),
        ("vision.image_mean", ["a", "b", "c"], "clip.vision.image_mean must be three numbers"),
        ("vision.image_std", [0.5, 0.0, 0.5], "clip.vision.image_std must be numbers above 0"),
        ("vision.image_std", [0.5, float("nan"), 0.5], "clip.vision.image_std must be finite numbers"),
        ("vision.image_max_pixels", 9, "clip.vision.image_max_pixels must be at least image_min_pixels, 256, got 9"),
        ("vision.wa_layer_indexes", [1, 2], "clip.vision.wa_layer_indexes is unknown and may change what"),
        ("vision.feature_layer", [1], "clip.vision.feature_layer is unknown"),
        ("tomorrow", 1, "clip.tomorrow is unknown and may change what the model computes; got 1"),
    ],
)
def test_metadata_that_would_run_wrong_are_refused_by_the_key(model, qwen, key, value, fault):
    _, facts, found = qwen
    facts = {**facts, f"clip.{key}": value}
    if isinstance(value, int) and value < 0:
        facts[f"clip.{key}"] = 0
    _rewritten(model, {key: value for key, value in facts.items() if value is not None}, found)
    assert fault in _refused(model)


def test_keys_that_restate_others_or_that_no_converter_gets_right_change_nothing(model, qwen):
    _, facts, found = qwen
    expected = model_config(open_model(model, Config()))
    more = {
        "has_qwen2vl_merger": True,
        "has_text_encoder": False,
        "vision.feed_forward_length": 0,
        "minicpmv_version": 0,
    }
    _rewritten(model, facts | {f"clip.{key}": value for key, value in more.items()}, found)
    assert model_config(open_model(model, Config())) == expected


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("v.blk.1.attn_k.weight", None, "tensor 'v.blk.1.attn_k.weight' is missing"),
        ("v.blk.1.attn_k.weight", lambda array: array[:, :16], "do not have rows of one length"),
        ("v.blk.0.ffn_up.weight", None, "tensor 'v.blk.0.ffn_up.weight' must be a matrix with a side of 32"),
        ("v.blk.0.ffn_up.weight", lambda array: array[:32], "tensor 'v.blk.0.ffn_up.weight' is square"),
        ("v.patch_embd.weight.1", lambda array: array[:, :2], "v.patch_embd.weight.1 must have one shape of 4 dimens"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused_by_name(model, qwen, name, change, fault):
    _, facts, found = qwen
    changed = {key: array for key, array in found.items() if key != name}
    if change is not None:
        changed[name] = np.ascontiguousarray(change(found[name]))
    _rewritten(model, facts, changed)
    assert fault in _refused(model)


def test_an_unknown_tensor_is_refused_by_name(model, qwen):
    for name in ("v.blk.0.attn_q_norm.weight", "a.conv1d.0.weight", "v.deepstack.1.norm.weight", "v.blk.x.ln1.weight"):
        _rewritten(model, qwen[1], qwen[2] | {name: np.ones(4, np.float32)})
        assert f"tensor '{name}' is not part of a known model" in _refused(model)


def test_older_files_with_the_matrices_of_an_mlp_under_each_others_name_are_the_same(model, qwen):
    _, facts, found = qwen
    expected = _weights(open_model(model, Config()))
    turned = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    swapped = {".".join(turned.get(part, part) for part in name.split(".")): array for name, array in found.items()}
    assert swapped["v.blk.0.ffn_up.weight"] is found["v.blk.0.ffn_down.weight"]
    _rewritten(model, facts, swapped)
    changed = _weights(open_model(model, Config()))
    assert changed.keys() == expected.keys()
    assert all((changed[name] == expected[name]).all() for name in expected)


KINDS = {
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q5_0": gguf.GGMLQuantizationType.Q5_0,
    "IQ4_NL": gguf.GGMLQuantizationType.IQ4_NL,
}


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_tensors_of_each_type_have_the_values_that_the_gguf_package_reads(model, qwen, kind):
    _, facts, found = qwen
    expected, stored = {}, {}
    for index, (name, array) in enumerate(found.items()):
        own = list(KINDS.values())[index % len(KINDS)] if kind == "mixed" else KINDS[kind]
        if array.ndim != 2 or (array.shape[1] % 32 and own not in (KINDS["F16"], KINDS["BF16"])):
            own = gguf.GGMLQuantizationType.F32
        try:
            data = gguf.quants.quantize(array, own)
        except NotImplementedError:  # a type that the package reads only: any bytes will do
            rows, columns = array.shape
            random = np.random.default_rng(index).integers(0, 120, (rows, columns // 32 * 18), np.uint8)
            data = random
        stored[name] = (data, own) if own != gguf.GGMLQuantizationType.F32 else array
        expected[name] = gguf.quants.dequantize(data, own)
    _rewritten(model, facts, stored)
    weights = _weights(open_model(model, Config()))
    for name, own in (("attn.proj", "attn_out"), ("mlp.down_proj", "ffn_down")):
        assert (weights[f"visual.blocks.1.{name}.weight"] == expected[f"v.blk.1.{own}.weight"]).all()
    joined = np.concatenate([expected[f"v.blk.2.attn_{part}.weight"] for part in "qkv"])
    assert (weights["visual.blocks.2.attn.qkv.weight"] == joined).all()


def test_a_type_that_is_not_read_names_the_tensor_and_another_file(model, qwen):
    _, facts, found = qwen
    _rewritten(model, facts, found | {"v.blk.0.ln1.weight": np.ones(32, np.int32)})
    assert "tensor 'v.blk.0.ln1.weight' has type I32, which cannot be read" in _refused(model)


def _published(oracle, folder, preprocessor, drop=(), more=()):
    """What the pair says if the mmproj file has nothing but what the converter writes."""
    facts = {key: value for key, value in metadata(oracle, preprocessor).items() if key not in drop} | dict(more)
    path = write_pair(folder, oracle, preprocessor, TOKENS)
    tiny_gguf.write_gguf(path.with_name(NAME), facts, tensors(oracle))
    source = _pair(path)
    return model_config(source), preprocessor_config(source)


LIMITS = [f"clip.vision.image_{end}_pixels" for end in ("min", "max")]


def test_what_files_do_not_say_of_qwens_is_as_transformers_and_the_makers_have_it(qwen, tmp_path):
    hf, pictures = _published(
        qwen[0], tmp_path / "2.5", tiny_qwen_vl.PREPROCESSOR, drop=(*LIMITS, "clip.vision.window_size")
    )
    assert hf["vision_config"]["window_size"] == transformers.Qwen2_5_VLConfig().vision_config.window_size
    assert pictures["size"] == {"shortest_edge": 3136, "longest_edge": 12845056}
    deep = tiny_qwen_vl.write(tmp_path / "hf", "qwen3")
    hf, pictures = _published(deep, tmp_path / "3", tiny_qwen_vl.PREPROCESSOR, drop=LIMITS)
    assert pictures["size"] == {"shortest_edge": 65536, "longest_edge": 16777216}


def test_files_that_disagree_about_deep_layers_are_refused(tmp_path):
    deep = tiny_qwen_vl.write(tmp_path / "hf", "qwen3")
    key = "clip.vision.is_deepstack_layers"
    for more in ({key: [True, False, False]}, {key: [False] * 3}):
        with pytest.raises(StartupError, match=r"is_deepstack_layers has \d layers, but qwen3vl.n_deepstack_layers"):
            _published(deep, tmp_path / "3", tiny_qwen_vl.PREPROCESSOR, more=more)
    with pytest.raises(StartupError, match="is_deepstack_layers must have a flag for each of 3 layers"):
        _published(deep, tmp_path / "3", tiny_qwen_vl.PREPROCESSOR, more={key: [True, True]})


def test_what_files_do_not_say_of_smolvlms_is_as_the_makers_have_it(tmp_path):
    oracle = tiny_idefics3.write(tmp_path / "hf", "smolvlm")
    settings = HALF | tiny_idefics3.PREPROCESSORS["smolvlm"]
    eps, size = "clip.vision.attention.layer_norm_epsilon", "clip.vision.preproc_image_size"
    hf, pictures = _published(oracle, tmp_path / "m", settings, drop=(size,), more={eps: 1e-5})
    assert pictures["size"] == {"longest_edge": 4 * 28}
    default = transformers.SmolVLMConfig().vision_config.layer_norm_eps  # the converter writes 1e-5 for it
    assert hf["vision_config"]["layer_norm_eps"] == default
    hf, _ = _published(oracle, tmp_path / "m", settings, more={eps: 2e-5})
    assert hf["vision_config"]["layer_norm_eps"] == 2e-5


def test_pixtrals_of_mistrals_own_format_have_the_same_weights_and_their_ropes_base(tmp_path):
    oracle = tiny_pixtral.write(tmp_path / "hf", "mistral-gguf")
    settings = tiny_pixtral.IN_GGUF["mistral-gguf"].preprocessor
    hf, _ = _published(oracle, tmp_path / "m", settings, more={"clip.rope.freq_base": 50.0})
    assert hf["vision_config"]["rope_theta"] == 50
    path = write_pair(tmp_path / "m", oracle, settings, TOKENS | {"[IMG_BREAK]": tiny_pixtral.BREAK})
    expected = _weights(_pair(path))
    row = oracle.get_input_embeddings().weight.detach().numpy()[tiny_pixtral.BREAK]
    noise = np.random.default_rng(4).standard_normal(len(row)).astype(np.float32)
    for values in (row, row.astype(np.float16), row + np.float32(0.2) * row.std() * noise):
        extra = tensors(oracle) | {"v.token_embd.img_break": values}
        tiny_gguf.write_gguf(path.with_name(NAME), metadata(oracle, settings), extra)
        assert _weights(_pair(path)).keys() == expected.keys()
    for values in (noise, row[:32], oracle.get_input_embeddings().weight.detach().numpy()[tiny_pixtral.END]):
        extra = tensors(oracle) | {"v.token_embd.img_break": values}
        tiny_gguf.write_gguf(path.with_name(NAME), metadata(oracle, settings), extra)
        with pytest.raises(
            StartupError, match=r"'v.token_embd.img_break' is not the model's embedding of \[IMG_BREAK\]"
        ):
            _pair(path)
        assert open_model(path, Config()).mmproj.path is None
    with pytest.raises(StartupError, match=r"layer_norm_epsilon must be 1e-05 with pixtral, got 0\.001"):
        _published(oracle, tmp_path / "m", settings, more={"clip.vision.attention.layer_norm_epsilon": 1e-3})


def test_a_merge_without_its_matrix_is_refused(tmp_path):
    oracle = tiny_pixtral.write(tmp_path / "hf", "pixtral-gguf")
    settings = tiny_pixtral.IN_GGUF["pixtral-gguf"].preprocessor
    with pytest.raises(StartupError, match=r"clip\.vision\.spatial_merge_size is 2, but there is no tensor 'mm\.pa"):
        _published(oracle, tmp_path / "m", settings, more={"clip.vision.spatial_merge_size": 2})


@pytest.mark.parametrize("variant", ["qwen2.5", "qwen3", "qwen3-moe"])
def test_a_qwen_without_its_mmproj_file_is_a_text_model(tmp_path, variant):
    oracle = tiny_qwen_vl.write(tmp_path / "hf", variant)
    path = write_pair(tmp_path / "m", oracle, tiny_qwen_vl.PREPROCESSOR, {})
    path.with_name(NAME).unlink()
    hf = model_config(open_model(path, Config()))
    assert not is_family(hf)
    described, whole = loading.describe(hf), loading.describe(msgspec.json.decode(msgspec.json.encode(hf)))
    assert described == whole
    assert described.num_deep_inputs == 0


@pytest.mark.parametrize("sections", [None, [2, 3], [2, 3, 4, 0], [2, 3, 2, 1], [9, 3, -4, 0], [2.0, 3.0, 3.0, 0.0], 8])
def test_sections_that_do_not_divide_a_heads_pairs_are_refused_by_the_key(qwen, tmp_path, sections):
    path = write_pair(tmp_path / "m", qwen[0], tiny_qwen_vl.PREPROCESSOR, {})
    reader = gguf.GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    facts.pop("qwen2vl.rope.dimension_sections")
    facts |= {} if sections is None else {"qwen2vl.rope.dimension_sections": sections}
    tiny_gguf.write_gguf(path, facts, {tensor.name: np.array(tensor.data) for tensor in reader.tensors})
    with pytest.raises(StartupError, match=r"qwen2vl\.rope\.dimension_sections must be three counts that add up to 8"):
        model_config(open_model(path))
