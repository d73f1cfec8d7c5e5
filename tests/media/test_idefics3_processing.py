"""Pictures become the tiles, and the text, that transformers makes of them for Idefics3 and SmolVLM."""

import json

import numpy as np
import pytest
import tiny_idefics3
from tiny_llava import SIZES, picture
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tureen.errors import RequestFailed, StartupError
from tureen.media import idefics3
from tureen.media.base import Prepared

CLOSE = 1e-5
PLACES = ("<fake_token_around_image>", "<image>", "<global-img>")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """config.json of each variant."""
    found = {}
    for variant in tiny_idefics3.VARIANTS:
        folder = tmp_path_factory.mktemp(variant)
        tiny_idefics3.write(folder, variant)
        found[variant] = json.loads((folder / "config.json").read_text())
    return found


def _make_family(configs, variant, **changes):
    return idefics3.parse(configs[variant], tiny_idefics3.PREPROCESSORS[variant] | changes)


def _check_tiles(family, oracle, pictures):
    expected = oracle([pictures], return_tensors="np", return_row_col_info=True)
    prepared = family.prepare(pictures, "image")
    scale, mean, std = map(np.array, family.normalisation)
    found = np.concatenate([one.pixels for one in prepared])
    found = np.moveaxis((found * scale - mean) / std, -1, 1)
    assert found.shape == expected["pixel_values"][0].shape
    assert np.abs(found - expected["pixel_values"][0]).max() < CLOSE
    layouts = [list(one.layout) for one in prepared]
    assert layouts == np.stack([expected["rows"][0], expected["cols"][0]], axis=-1).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", tiny_idefics3.VARIANTS)
def test_tiles_are_those_of_transformers(configs, variant, size):
    pictures = [picture(*size), picture(41, 30, seed=1)]
    _check_tiles(_make_family(configs, variant), tiny_idefics3.image_processor(variant), pictures)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_resize": False},
        {"do_resize": False, "do_image_splitting": False},
        {"do_rescale": False},
        {"do_normalize": False},
        {"resample": 3},
        {"size": {"longest_edge": 27}},
        {"size": {"longest_edge": 28}},
        {"size": {"longest_edge": 29}},
        {"image_processor_type": "SmolVLMImageProcessor"},
        {"size": None, "max_image_size": {"longest_edge": 28}},
    ],
)
@pytest.mark.parametrize("size", [(57, 31), (31, 57), (28, 28), (56, 56), (61, 59), (2, 1)])
def test_settings_of_the_preprocessor_act_as_in_transformers(configs, changes, size):
    oracle = tiny_idefics3.image_processor("smolvlm", **{k: v for k, v in changes.items() if v is not None})
    if "size" in changes and changes["size"] is None:
        oracle = tiny_idefics3.image_processor("smolvlm", size={"longest_edge": 4 * 364})
    _check_tiles(_make_family(configs, "smolvlm", **changes), oracle, [picture(*size)])


@pytest.mark.parametrize("long_side", [28, 364 * 4, 2048, 4095, 4096, 4097, 5001])
def test_the_size_by_the_longest_edge_is_that_of_transformers(long_side):
    generator = np.random.default_rng(3)
    sizes = [(1, 1), (1, 200), (200, 1), (333, 333), *np.exp(generator.uniform(0, 8, (500, 2))).astype(int) + 1]
    for height, width in sizes:
        expected = get_resize_output_image_size(np.empty((3, height, width)), long_side)
        assert idefics3.with_long_side((int(height), int(width)), long_side) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", tiny_idefics3.VARIANTS)
def test_text_names_the_places_of_tiles_as_in_transformers(configs, variant, size):
    family = _make_family(configs, variant)
    [prepared] = family.prepare([picture(*size)], "image")
    num_tokens = prepared.num_tokens // len(prepared.pixels)
    assert num_tokens == {"smolvlm": 4, "smolvlm-stretched": 1, "idefics3": 25, "idefics3-whole": 16}[variant]
    text = "".join(part.text + "<image>" * part.num_tokens for part in family.parts(prepared))
    assert text == get_image_prompt_string(*prepared.layout, num_tokens, *PLACES)


@pytest.mark.parametrize(
    ("tiles", "side", "num_tokens", "layout"),
    [
        (5, 28, 20, ()),
        (5, 28, 20, (4,)),
        (5, 28, 20, (2, 2, 0)),
        (5, 28, 20, (0, 0)),
        (5, 28, 20, (-2, -2)),
        (5, 28, 20, (2, 3)),
        (5, 28, 19, (2, 2)),
        (5, 28, 1 << 60, (2, 2)),
        (2, 28, 8, (1, 1)),
        (1, 28, 4, (0, 5)),
        (1, 28, 4, (5, 0)),
        (1, 28, 4, (1 << 40, 1 << 40)),
        (5, 1, 20, (2, 2)),
    ],
)
def test_a_layout_that_no_picture_has_fails_the_request(configs, tiles, side, num_tokens, layout):
    family = _make_family(configs, "smolvlm")
    assert len(family.parts(Prepared(np.zeros((5, 28, 28, 3), np.uint8), 20, (2, 2)))) == 6
    with pytest.raises(RequestFailed, match=f"a picture of {tiles} tiles cannot be laid out in"):
        family.parts(Prepared(np.zeros((tiles, side, side, 3), np.uint8), num_tokens, layout))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type"),
        ({"size": 84}, "size"),
        ({"size": {"shortest_edge": 84}}, "size"),
        ({"size": {"longest_edge": 84, "shortest_edge": 28}}, "size"),
        ({"size": {"height": 84}}, "size"),
        ({"size": {"longest_edge": 0}}, "longest_edge"),
        ({"max_image_size": {"longest_edge": 56}}, "max_image_size"),
        ({"max_image_size": None}, "max_image_size"),
        ({"max_image_size": {"longest_edge": "28"}}, "longest_edge"),
        ({"do_image_splitting": 1}, "do_image_splitting"),
        ({"do_resize": "yes"}, "do_resize"),
        ({"resample": 9}, "resample"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_a_preprocessor_that_cannot_be_honoured_is_refused_by_its_key(configs, changes, key):
    with pytest.raises(StartupError, match=f"preprocessor_config.json.*: {key}: ") as error:
        _make_family(configs, "smolvlm", **changes)
    assert error.value.field == key


def test_a_folder_without_preprocessor_is_refused(configs):
    with pytest.raises(StartupError, match=r"preprocessor_config.json: .* is missing"):
        idefics3.parse(configs["smolvlm"], {})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "siglip_vision_model"}, "model_type"),
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"num_channels": 4}, "num_channels"),
        ({"image_size": [28, 28]}, "image_size"),
        ({"patch_size": 30}, "scale_factor"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"layer_norm_eps": 0}, "layer_norm_eps"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 50}, "num_hidden_layers"),  # memory grows with it before a weight is compared
    ],
)
def test_a_tower_that_cannot_be_honoured_is_refused_by_its_key(configs, changes, key):
    hf = configs["smolvlm"] | {"vision_config": configs["smolvlm"]["vision_config"] | changes}
    with pytest.raises(StartupError, match=f"config.json.*: {key}: ") as error:
        idefics3.parse(hf, tiny_idefics3.PREPROCESSORS["smolvlm"])
    assert error.value.field == key


@pytest.mark.parametrize(("key", "value"), [("scale_factor", 3), ("scale_factor", 0), ("image_token_id", -1)])
def test_a_config_that_cannot_be_honoured_is_refused_by_its_key(configs, key, value):
    with pytest.raises(StartupError, match=f"config.json: {key}: ") as error:
        idefics3.parse(configs["smolvlm"] | {key: value}, tiny_idefics3.PREPROCESSORS["smolvlm"])
    assert error.value.field == key
