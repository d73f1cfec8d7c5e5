"""Pictures become the tiles, and as many tokens, as with the processors of transformers."""

import json

import numpy as np
import pytest
import tiny_llava
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor
from transformers.image_processing_utils import select_best_resolution

from tureen.errors import StartupError
from tureen.media import llava, llava_next, llava_onevision, tiles
from tureen.media.resizing import PROCESSORS, picture_settings

FILES = {"llava": llava, "next": llava_next, "onevision": llava_onevision}
CLOSE = 1e-3


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """config.json of each variant."""
    found = {}
    for variant in tiny_llava.VARIANTS:
        folder = tmp_path_factory.mktemp(variant)
        tiny_llava.write(folder, variant)
        found[variant] = json.loads((folder / "config.json").read_text())
    return found


def _make_family(configs, variant, **changes):
    preprocessor = {**tiny_llava.PREPROCESSORS[variant], **changes}
    return FILES[variant.split("-")[0]].parse(configs[variant], preprocessor)


def _normalised(variant, pixels):
    settings = picture_settings(tiny_llava.PREPROCESSORS[variant], *PROCESSORS)
    return np.moveaxis(
        (pixels * settings.normalisation.scale - np.array(settings.normalisation.mean))
        / np.array(settings.normalisation.std),
        -1,
        1,
    )


@pytest.mark.parametrize("size", tiny_llava.SIZES)
@pytest.mark.parametrize("variant", tiny_llava.VARIANTS)
def test_tiles_are_those_of_transformers(configs, variant, size):
    picture = tiny_llava.picture(*size)
    [prepared] = _make_family(configs, variant).prepare([picture], "image")
    expected = np.asarray(tiny_llava.processor(variant)(picture, return_tensors="np")["pixel_values"])
    expected = expected.reshape(-1, *expected.shape[-3:])
    found = _normalised(variant, prepared.pixels)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < CLOSE


@pytest.mark.parametrize("size", tiny_llava.SIZES)
def test_one_of_several_pictures_is_the_tile_of_transformers(configs, size):
    pictures = [tiny_llava.picture(*size), tiny_llava.picture(30, 90, seed=1)]
    prepared = _make_family(configs, "onevision").prepare(pictures, "multi-images")
    expected = tiny_llava.processor("onevision")([pictures], return_tensors="np")["pixel_values"]
    for one, wanted in zip(prepared, expected, strict=True):
        found = _normalised("onevision", one.pixels)
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() < CLOSE
        assert one.num_tokens == 16 + 1


def test_frames_of_a_video_are_stretched_to_a_tile_each(configs):
    frames = [tiny_llava.picture(50, 40, seed) for seed in range(3)]
    [prepared] = _make_family(configs, "onevision").prepare(frames, "video")
    for found, frame in zip(prepared.pixels, frames, strict=True):
        assert np.array_equal(found, np.asarray(frame.resize((28, 28), 3)))
    assert prepared.num_tokens == 3 * 2 * 2 + 1


@pytest.mark.parametrize("size", [*tiny_llava.SIZES, (1920, 1080), (640, 4000), (111, 110), (224, 28)])
@pytest.mark.parametrize("variant", ["next-vicuna", "onevision"])
def test_a_picture_takes_as_many_tokens_as_the_processor_of_transformers_says(configs, variant, size):
    [prepared] = _make_family(configs, variant).prepare([tiny_llava.picture(*size)], "image")
    if variant == "onevision":
        oracle = object.__new__(LlavaOnevisionProcessor)
        oracle.num_image_tokens, oracle.vision_aspect_ratio = 16, "anyres_max_3"
    else:
        oracle = object.__new__(LlavaNextProcessor)
        oracle.patch_size, oracle.num_additional_image_tokens = 7, 0
    oracle.image_processor = tiny_llava.processor(variant)
    assert prepared.num_tokens == oracle._get_number_of_features(size[1], size[0], 28, 28)


@pytest.mark.parametrize("grid", [llava_next.GRID, llava_onevision.GRID])
def test_the_resolution_of_a_picture_is_the_one_that_transformers_selects(grid):
    generator = np.random.default_rng(5)
    sizes = tuple((height, width) for height, width in grid)
    for height, width in [(336, 336), (1, 1), *np.exp(generator.uniform(0, 8, (300, 2))).astype(int) + 1]:
        size = (int(height), int(width))
        assert tiles.best_resolution(size, sizes) == select_best_resolution(size, grid)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type"),
        ({"size": {"longest_edge": 28}}, "size"),
        ({"crop_size": {"height": 28, "width": 35}}, "size"),
        ({"do_center_crop": False}, "do_center_crop"),
        ({"do_resize": "yes"}, "do_resize"),
        ({"resample": 9}, "resample"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"rescale_factor": 0}, "rescale_factor"),
    ],
)
def test_a_preprocessor_that_cannot_be_honoured_is_refused_by_its_key(configs, changes, key):
    with pytest.raises(StartupError, match=f"preprocessor_config.json.*: {key}: ") as error:
        _make_family(configs, "llava-clip", **changes)
    assert error.value.field == key


@pytest.mark.parametrize(
    ("variant", "changes", "key"),
    [
        ("onevision", {"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio"),
        ("onevision", {"image_grid_pinpoints": [[28, 30]]}, "image_grid_pinpoints"),
        ("onevision", {"image_grid_pinpoints": tiny_llava.GRID}, "image_grid_pinpoints"),
        ("next-vicuna", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ("llava-clip", {"vision_feature_layer": 4}, "vision_feature_layer"),
        ("llava-clip", {"vision_feature_layer": []}, "vision_feature_layer"),
        ("llava-clip", {"projector_hidden_act": "tanh"}, "projector_hidden_act"),
        ("llava-clip", {"vision_config": {"model_type": "vivit"}}, "model_type"),
        ("llava-clip", {"vision_config": {**tiny_llava.CLIP, "num_attention_heads": 5}}, "hidden_size"),
        ("llava-clip", {"image_token_index": -1}, "image_token_index"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_its_key(configs, variant, changes, key):
    hf = {**configs[variant], **changes}
    with pytest.raises(StartupError, match=f": {key}: ") as error:
        FILES[variant.split("-")[0]].parse(hf, tiny_llava.PREPROCESSORS[variant])
    assert error.value.field == key


def test_a_folder_without_preprocessor_is_refused(configs):
    with pytest.raises(StartupError, match=r"preprocessor_config.json: .* is missing"):
        llava.parse(configs["llava-clip"], {})


def test_older_files_give_sizes_as_numbers(configs):
    old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 28, "crop_size": 28, "resample": 3}
    family = llava.parse(configs["llava-clip"], old)
    picture = tiny_llava.picture(60, 40)
    [expected] = _make_family(configs, "llava-clip").prepare([picture], "image")
    [found] = family.prepare([picture], "image")
    assert np.array_equal(found.pixels, expected.pixels)


@pytest.mark.parametrize("variant", tiny_llava.VARIANTS)
def test_a_placeholder_may_be_unknown_to_the_tokenizer(configs, variant):
    assert _make_family(configs, variant).placeholder_id == tiny_llava.IMAGE
    unknown = {**configs, variant: {**configs[variant], "image_token_index": None}}
    assert _make_family(unknown, variant).placeholder_id is None
