"""GGUF models with an mmproj file: embeddings, log-probabilities and tokens equal those of transformers."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import msgspec
import numpy as np
import pytest
import tiny_gemma
import tiny_gguf
import tiny_idefics3
import tiny_llava
import tiny_pixtral
import tiny_qwen_vl
import transformers
from converted_vision import MMPROJ, metadata, tensors, write_llava_pair, write_pair
from gemma_checks import check_end_to_end as check_gemma
from gemma_checks import expected_embeddings as expected_of_gemma
from idefics3_checks import check_end_to_end as check_idefics3
from idefics3_checks import expected_embeddings as expected_of_idefics3
from llava_checks import Model, check_embeddings, check_end_to_end, expected_embeddings, load_tiny_encoder
from qwen_checks import PICTURES
from qwen_checks import check_end_to_end as check_qwen
from qwen_checks import expected_embeddings as expected_of_qwen
from runner_driver import folder_source

from tureen.config import Config
from tureen.devices.base import DeviceInfo
from tureen.devices.groups import RankGroup
from tureen.errors import StartupError
from tureen.media.families import find_family, is_family
from tureen.media.resizing import CLIP_MEAN, CLIP_STD
from tureen.registry import find_model
from tureen.runner import rank_child
from tureen.runner.load import load_runner
from tureen.runner.loading import architecture_of, describe
from tureen.runner.rank_orders import RankOrder
from tureen.runner.ranks import Ranks
from tureen.weights.source import model_config, open_model, preprocessor_config
from tureen.weights.stored import to_float32
from tureen.weights.vision import iter_vision

QWEN = {"<|image_pad|>": tiny_qwen_vl.IMAGE}
IDEFICS3 = {"<image>": tiny_idefics3.IMAGE, "<fake_token_around_image>": 251}
PIXTRAL = {"[IMG]": tiny_pixtral.IMAGE, "[IMG_BREAK]": tiny_pixtral.BREAK, "[IMG_END]": tiny_pixtral.END}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CLIP = {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
SIZES = [(57, 31), (3, 2), (300, 20)]


GEMMA3, GEMMA4 = tiny_gemma.special("gemma3"), tiny_gemma.special("gemma4")


def _model(path, oracle, variant, tiny):
    source = folder_source(path)
    family = find_family(model_config(source), preprocessor_config(source))
    return Model(path, oracle, variant, load_tiny_encoder(path), family, tiny, getattr(tiny, "TEXT_IDS", {}))


@pytest.fixture(scope="module", params=tiny_qwen_vl.VARIANTS)
def qwen(request, tmp_path_factory):
    folder, variant = tmp_path_factory.mktemp(request.param), request.param
    oracle = tiny_qwen_vl.write(folder / "hf", variant)
    path = write_pair(folder / "gguf", oracle, tiny_qwen_vl.PREPROCESSOR, QWEN)
    return _model(path, oracle, variant, tiny_qwen_vl)


@pytest.fixture(scope="module", params=["smolvlm", *tiny_idefics3.IN_GGUF])
def idefics3(request, tmp_path_factory):
    folder, variant = tmp_path_factory.mktemp(request.param), request.param
    oracle = tiny_idefics3.write(folder / "hf", variant)
    path = write_pair(folder / "gguf", oracle, HALF | tiny_idefics3.PREPROCESSORS[variant], IDEFICS3)
    return _model(path, oracle, variant, tiny_idefics3)


@pytest.fixture(scope="module", params=tiny_pixtral.IN_GGUF)
def pixtral(request, tmp_path_factory):
    folder, variant = tmp_path_factory.mktemp(request.param), request.param
    oracle = tiny_pixtral.write(folder / "hf", variant)
    path = write_pair(folder / "gguf", oracle, tiny_pixtral.IN_GGUF[variant].preprocessor, PIXTRAL)
    return _model(path, oracle, variant, tiny_pixtral)


@pytest.fixture(scope="module", params=["llava-clip", "next-vicuna"])
def llava(request, tmp_path_factory):
    folder, variant = tmp_path_factory.mktemp(request.param), request.param
    oracle = tiny_llava.write(folder / "hf", variant)
    path = write_llava_pair(folder / "gguf", oracle, CLIP, {"<image>": tiny_llava.IMAGE})
    padding = transformers.LlavaImageProcessorPil(**tiny_llava.CROPPED, do_pad=True)  # as the authors' code does
    tiny = SimpleNamespace(processor=lambda _: padding) if variant == "llava-clip" else tiny_llava
    return _model(path, oracle, variant, tiny)


@pytest.fixture(scope="module", params=["gemma3", "gemma3-long"])
def gemma3(request, tmp_path_factory):
    folder, variant = tmp_path_factory.mktemp(request.param), request.param
    oracle = tiny_gemma.write(folder / "hf", variant)
    path = write_pair(folder / "gguf", oracle, HALF | tiny_gemma.preprocessor(variant), GEMMA3)
    return _model(path, oracle, variant, tiny_gemma)


@pytest.fixture(scope="module", params=tiny_gemma.IN_GGUF)
def gemma4(request, tmp_path_factory):
    folder, variant = tmp_path_factory.mktemp(request.param), request.param
    oracle = tiny_gemma.write(folder / "hf", variant)
    path = write_pair(folder / "gguf", oracle, tiny_gemma.preprocessor(variant), GEMMA4)
    return _model(path, oracle, variant, tiny_gemma)


def _weights_of(source):
    """The weights of the vision encoder, by the names used here."""
    hf = model_config(source)
    vision = find_model(architecture_of(hf)).parse_vision(hf)
    weights = {vision.local_name(stored.name): to_float32(stored) for stored in iter_vision(source)}
    return {name: array for name, array in weights.items() if name is not None}


def test_the_weights_of_a_qwen_are_those_of_the_checkpoint(qwen):
    weights = _weights_of(folder_source(qwen.folder))
    expected = _weights_of(folder_source(qwen.folder.parent.parent / "hf"))
    if any(name.startswith("deep.") for name in expected):  # numbered by layer in the one, by the config in the other
        assert sorted(weights) == sorted(expected)
        weights, expected = ({k: v for k, v in one.items() if "deep." not in k} for one in (weights, expected))
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not np.array_equal(weights[name], expected[name])] == []


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_a_qwen_equal_transformers(qwen, size):
    picture = tiny_llava.picture(*size)
    [prepared] = qwen.family.prepare([picture], "image")
    check_embeddings(qwen.encoder, prepared, expected_of_qwen(qwen, picture))


def test_tokens_of_a_qwen_equal_transformers(qwen):
    check_qwen(qwen, PICTURES)
    check_qwen(qwen, PICTURES[:1], kernels="torch")
    check_qwen(qwen, [])


@pytest.mark.parametrize("qwen", ["qwen3"], indirect=True)
def test_a_rank_is_told_both_files(qwen, monkeypatch):
    orders = []

    def start(self, order):
        orders.append(msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=RankOrder))
        raise InterruptedError

    monkeypatch.setattr(Ranks, "start", start)
    source, config = folder_source(qwen.folder), Config(device="cpu", tensor_parallel_size=2, max_total_tokens=256)
    with pytest.raises(InterruptedError):
        load_runner(source, config)
    runner = rank_child._load(orders[0], DeviceInfo("cpu", "cpu", 1), RankGroup(1, 2))
    assert runner._model == describe(model_config(source))
    assert runner._model.num_deep_inputs == 2


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_an_idefics3_equal_transformers(idefics3, size):
    picture = tiny_llava.picture(*size)
    [prepared] = idefics3.family.prepare([picture], "image")
    check_embeddings(idefics3.encoder, prepared, expected_of_idefics3(idefics3, [picture]))


def test_tokens_of_an_idefics3_equal_transformers(idefics3):
    check_idefics3(idefics3, 2)


@pytest.mark.parametrize("size", [(57, 31), (20, 13), (300, 20)])
def test_embeddings_of_a_pixtral_equal_transformers(pixtral, size):
    picture = tiny_llava.picture(*size)
    [prepared] = pixtral.family.prepare([picture], "image")
    [expected] = expected_embeddings(pixtral, [picture], "image")
    check_embeddings(pixtral.encoder, prepared, expected)


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_a_llava_equal_transformers(llava, size):
    picture = tiny_llava.picture(*size)
    [prepared] = llava.family.prepare([picture], "image")
    [expected] = expected_embeddings(llava, [picture], "image")
    check_embeddings(llava.encoder, prepared, expected)


def test_tokens_of_a_llava_equal_transformers(llava):
    check_end_to_end(llava, PICTURES, "image")


def test_a_vocabulary_of_a_llava_may_be_without_its_placeholder_and_the_oldest_files_name_no_projector(llava, tmp_path):
    path = write_llava_pair(tmp_path / "gguf", llava.oracle, CLIP, {}, **{"clip.projector_type": None})
    source = folder_source(path)
    family = find_family(model_config(source), preprocessor_config(source))
    assert (family.placeholder, family.placeholder_id) == ("<image>", None)


@pytest.mark.parametrize("llava", ["next-vicuna"], indirect=True)
@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"clip.vision.image_grid_pinpoints": [56, 28, 28]}, "image_grid_pinpoints must be pairs of integers"),
        ({"clip.vision.mm_patch_merge_type": "flat"}, "mm_patch_merge_type must be spatial_unpad, got 'flat'"),
        ({"clip.vision.feature_layer": [1, 2]}, "clip.vision.feature_layer"),
    ],
)
def test_a_llava_of_another_kind_is_refused_by_the_key_at_fault(llava, more, fault, tmp_path):
    path = write_llava_pair(tmp_path / "gguf", llava.oracle, CLIP, {}, **more)
    with pytest.raises(StartupError, match=re.escape(fault)):
        model_config(open_model(path, Config(mmproj=str(path.with_name(MMPROJ)))))


def test_tokens_of_a_pixtral_equal_transformers(pixtral):
    check_end_to_end(pixtral, PICTURES, "multi-images")


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_a_gemma_3_equal_transformers(gemma3, size):
    picture = tiny_llava.picture(*size)
    [prepared] = gemma3.family.prepare([picture], "image")
    check_embeddings(gemma3.encoder, prepared, expected_of_gemma(gemma3, [picture]))


def test_tokens_of_a_gemma_3_equal_transformers(gemma3):
    check_gemma(gemma3, 2)


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_a_gemma_4_equal_transformers(gemma4, size):
    picture = tiny_llava.picture(*size)
    [prepared] = gemma4.family.prepare([picture], "image")
    check_embeddings(gemma4.encoder, prepared, expected_of_gemma(gemma4, [picture]))


def test_tokens_of_a_gemma_4_equal_transformers(gemma4):
    check_gemma(gemma4, 2, context_length=1024, chunked_prefill_size=1024)
    check_gemma(gemma4, 1, kernels="torch")


def test_the_weights_of_a_gemma_4_are_those_of_the_checkpoint_and_sounds_are_left_out(gemma4):
    expected = _weights_of(folder_source(gemma4.folder.parent.parent / "hf"))
    facts, eye = _both_parts(gemma4)
    ear = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSOR if tensor.name.startswith("A_")]
    names = [f"{name.format(bid=0, xid=0)}.{kind}" for name in ear for kind in ("weight", "bias", "input_min")]
    sounds = {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a", "clip.audio.block_count": 12}
    found = dict.fromkeys(names, np.ones(3, np.float32))
    for more_facts, more in (({}, {}), (sounds, found)):
        path = tiny_gguf.write_gguf(gemma4.folder.with_name(MMPROJ), facts | more_facts, eye | more)
        weights = _weights_of(folder_source(gemma4.folder))
        load_tiny_encoder(gemma4.folder)
        assert {name: array.shape for name, array in weights.items()} == {k: v.shape for k, v in expected.items()}
        assert [name for name in expected if not np.array_equal(weights[name], expected[name])] == []
    tiny_gguf.write_gguf(path, facts, eye)
    bounds = {f"{part}_{end}" for part in ("input", "output") for end in ("min", "max")}
    own = bounds if gemma4.variant == "gemma4-causal-gguf" else {"std_bias", "std_scale"}
    assert own <= {name.rpartition(".")[2] for name in expected}


def _both_parts(model):
    """The metadata and tensors of a model's mmproj file."""
    return metadata(model.oracle, model.tiny.preprocessor(model.variant)), tensors(model.oracle)


WRONG_GEMMA4 = {
    "no bound": ({}, {"v.blk.1.ffn_up.output_max": None}, "layers.1.up.output_max"),
    "a bound of two numbers": ({}, {"v.blk.1.ffn_up.output_max": np.ones(2, np.float32)}, "up.output_max"),
    "one table": ({}, {"v.position_embd.weight": np.ones((850, 32), np.float32)}, "must be two tables"),
    "flat patches": ({}, {"v.patch_embd.weight": np.ones((32, 27), np.float32)}, "3 colours"),
    "a scale of layers": ({}, {"v.blk.0.out_scale.weight": np.ones(1, np.float32)}, "v.blk.0.out_scale.weight"),
    "half of a standardisation": ({}, {"v.std_bias": np.ones(32, np.float32)}, "std_scale"),
    "silu": ({"clip.use_silu": True}, {}, "clip.use_silu must be false"),
    "another limit": ({"clip.vision.image_max_pixels": 9}, {}, "clip.vision.image_max_pixels is unknown"),
    "few positions": ({}, {"v.position_embd.weight": np.ones((2, 200, 32), np.float32)}, "max_soft_tokens"),
}


@pytest.mark.parametrize("gemma4", ["gemma4-causal-gguf"], indirect=True)
@pytest.mark.parametrize("wrong", WRONG_GEMMA4)
def test_a_file_unlike_those_of_gemma_4_is_refused_by_name(gemma4, tmp_path, wrong):
    changed, others, message = WRONG_GEMMA4[wrong]
    facts, eye = _both_parts(gemma4)
    eye = {name: array for name, array in (eye | others).items() if array is not None}
    tiny_gguf.write_gguf(tmp_path / MMPROJ, facts | changed, eye)
    path = Path(shutil.copy(gemma4.folder, tmp_path))
    with pytest.raises(StartupError, match=re.escape(message)):
        _load(path)


@pytest.mark.parametrize("gemma4", ["gemma4-gguf"], indirect=True)
def test_a_gemma_4_that_pads_with_another_token_than_0_is_refused(gemma4, tmp_path):
    padding = {"tokenizer.ggml.padding_token_id": 3}
    path = write_pair(tmp_path / "m", gemma4.oracle, tiny_gemma.preprocessor(gemma4.variant), GEMMA4, padding)
    with pytest.raises(StartupError, match=r"tokenizer\.ggml\.padding_token_id must be 0"):
        _load(path)


STRANGE = ("x", "", 1.5, float("inf"), True, 0, 7, 1 << 31, [1], [1.5, 2.5, 3.5], ["x"], [True, False, True, False])


def _load(path) -> bool:
    """Loads a model's vision encoder; returns whether it takes pictures."""
    source = folder_source(path)
    hf = model_config(source)
    if is_family(hf):
        find_family(hf, preprocessor_config(source))
        load_tiny_encoder(path)
    return is_family(hf)


def _is_refused(path) -> bool:
    try:
        return not _load(path)
    except StartupError:
        return True


STRANGE_PAIRS = {
    "qwen3": (tiny_qwen_vl, tiny_qwen_vl.PREPROCESSOR, QWEN),
    "gemma3": (tiny_gemma, HALF | tiny_gemma.preprocessor("gemma3"), GEMMA3),
    "gemma4-gguf": (tiny_gemma, tiny_gemma.preprocessor("gemma4-gguf"), GEMMA4),
    "smolvlm": (tiny_idefics3, HALF | tiny_idefics3.PREPROCESSORS["smolvlm"], IDEFICS3),
}


@pytest.mark.parametrize("variant", STRANGE_PAIRS)
def test_any_value_under_any_key_is_taken_or_refused_with_an_error_for_people(tmp_path, variant):
    tiny, preprocessor, special = STRANGE_PAIRS[variant]
    oracle = tiny.write(tmp_path / "hf", variant)
    path = write_pair(tmp_path / "m", oracle, preprocessor, special)
    facts, eye, num_refused = metadata(oracle, preprocessor), tensors(oracle), 0
    for key in (key for key in facts if key.startswith("clip.")):
        for value in STRANGE:
            tiny_gguf.write_gguf(path.with_name(MMPROJ), facts | {key: value}, eye)
            num_refused += _is_refused(path)
    assert num_refused > 5 * len(facts)
