"""GPTQ, AWQ, FP8, MXFP4 and compressed-tensors: the values are those of the formats' definitions, in float64."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import quantised_writers as writers
import tiny_models
import torch
from mapped_pages import resident_kib
from quantised_writers import AWQ, FP8, GPTQ, compressed, rounded
from runner_driver import Running, generate
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.errors import StartupError
from tureen.kernels.cpu import native
from tureen.runner.load import load_runner
from tureen.weights.source import model_config
from tureen.weights.stored import iter_stored, to_float32

GOLDEN = Path(__file__).parents[1] / "golden" / "compressed_tensors.safetensors"
HALF = 2.0**-11  # of a value: what rounding it to float16 costs at most
ROWS, COLS = 72, 96  # rows that fill no chunk
PROMPT = list(range(7, 90, 2))
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}


def _weight(rows=ROWS, cols=COLS, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((rows, cols)) * generator.uniform(0.01, 0.05, (rows, 1))


def _source(path, tensors, settings, **how):
    return writers.write(path / "m", {f"a.{name}": tensor for name, tensor in tensors.items()}, settings, **how)


def _stored(source):
    return {stored.name: stored for stored in iter_stored(source, model_config(source))}


def _only(path, tensors, settings, **how):
    stored = _stored(_source(path, tensors, settings, **how))
    assert list(stored) == ["a.weight"]
    return stored["a.weight"]


def _fault(path, tensors, settings):
    source = _source(path, tensors, settings)
    with pytest.raises(StartupError) as caught:
        list(iter_stored(source, model_config(source)))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 96, None])
@pytest.mark.parametrize(
    ("write", "settings", "bits", "encoding"),
    [
        (writers.gptq, GPTQ, 4, "Q4_0"),
        (writers.gptq, GPTQ | {"bits": 8}, 8, "Q8_0"),
        (lambda matrix: writers.gptq(matrix, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}, 4, "Q4_0"),
        (writers.awq, AWQ, 4, "Q4_0"),
        (writers.packed, compressed("pack-quantized", **GROUPS), 4, "Q4_0"),
        (writers.packed, compressed("pack-quantized", **GROUPS | {"num_bits": 8}), 8, "Q8_0"),
        (writers.int8, compressed("int-quantized", num_bits=8, strategy="group", group_size=32), 8, "Q8_0"),
        (writers.int8, compressed("naive-quantized", num_bits=8, strategy="group", group_size=32), 8, "Q8_0"),
    ],
)
def test_symmetric_integers_and_scales_of_16_bits_are_kept_exactly(
    tmp_path, write, settings, bits, encoding, size, dtype
):
    settings = dict(settings)
    if "config_groups" in settings:
        (group,) = settings["config_groups"].values()
        size_or_row = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        settings["config_groups"] = {"group_0": group | {"weights": group["weights"] | size_or_row}}
    else:
        settings["group_size"] = size or -1
    matrix = rounded(_weight(), size=size, bits=bits, dtype=dtype)
    stored = _only(tmp_path, write(matrix), settings)
    assert (stored.encoding, stored.shape) == (encoding, (ROWS, COLS))
    np.testing.assert_array_equal(to_float32(stored), matrix.values())


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (writers.gptq, GPTQ),
        (lambda matrix: writers.gptq(matrix, version=2), GPTQ | {"format": "gptq_v2"}),
        (writers.awq, AWQ),
        (
            lambda matrix: writers.packed(matrix, symmetric=False),
            compressed("pack-quantized", **GROUPS, symmetric=False),
        ),
    ],
)
def test_zero_points_of_4_bits_become_offsets_that_are_rounded_to_float16(tmp_path, write, settings):
    matrix = rounded(_weight(), size=32, symmetric=False)
    assert len(np.unique(matrix.zeros)) > 4
    stored = _only(tmp_path, write(matrix), settings)
    assert stored.encoding == "Q4_1"
    offsets = np.abs(matrix.zeros * matrix.scales.double().numpy())[:, matrix.group_of]
    values = matrix.values()
    error = np.abs(to_float32(stored) - values)
    assert (error <= HALF * offsets + 2.0**-22 * np.abs(values)).all()
    in_bfloat16 = torch.from_numpy(values).bfloat16().double().numpy() - values
    assert np.square(error).sum() < np.square(in_bfloat16).sum()


def test_a_zero_point_of_0_borrows_from_the_field_above_in_gptq(tmp_path):
    matrix = rounded(_weight(), size=32, symmetric=False)
    matrix.zeros[::3] = 0
    matrix = matrix._replace(zeros=matrix.zeros)
    stored = _only(tmp_path, writers.gptq(matrix), GPTQ)
    np.testing.assert_allclose(to_float32(stored), matrix.values(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("cols", [64, 80])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_gptq_in_the_order_of_activations_becomes_exact_floats(tmp_path, cols, bits, symmetric):
    order = np.random.default_rng(1).permutation(cols)
    matrix = rounded(_weight(cols=cols), size=32, bits=bits, symmetric=symmetric, order=order)
    stored = _only(tmp_path, writers.gptq(matrix), GPTQ | {"desc_act": True, "bits": bits})
    assert stored.encoding == "F32"
    np.testing.assert_array_equal(to_float32(stored), matrix.values())


@pytest.mark.parametrize(
    ("write", "settings", "size", "cols", "bits", "symmetric"),
    [
        (writers.gptq, GPTQ | {"group_size": 16}, 16, 96, 4, True),
        (writers.gptq, GPTQ | {"group_size": 64}, 64, 96, 4, True),  # a group of 64, one of 32
        (writers.gptq, GPTQ | {"group_size": -1}, None, 40, 4, False),
        (writers.gptq, GPTQ | {"bits": 8}, 32, 96, 8, False),
        (writers.awq, AWQ | {"group_size": 48}, 48, 96, 4, True),
        (writers.packed, compressed("pack-quantized", num_bits=4, strategy="channel"), None, 43, 4, True),
    ],
)
def test_groups_that_blocks_cannot_hold_become_exact_floats(tmp_path, write, settings, size, cols, bits, symmetric):
    matrix = rounded(_weight(cols=cols), size=size, bits=bits, symmetric=symmetric)
    stored = _only(tmp_path, write(matrix), settings)
    assert (stored.encoding, stored.shape) == ("F32", (ROWS, cols))
    np.testing.assert_array_equal(to_float32(stored), matrix.values())


@pytest.mark.parametrize(("factor", "encoding"), [(1, "Q8_0"), (2.0**-12, "F32"), (2.0**30, "F32"), (1e-30, "F32")])
def test_scales_of_32_bits_are_rounded_only_where_that_loses_less_than_bfloat16(tmp_path, factor, encoding):
    matrix = rounded(_weight() * factor, size=32, bits=8, dtype=torch.float32)
    stored = _only(tmp_path, writers.gptq(matrix), GPTQ | {"bits": 8})
    values = matrix.values()
    error = np.abs(to_float32(stored) - values)
    assert stored.encoding == encoding
    assert (error <= HALF * np.abs(values)).all()
    in_bfloat16 = torch.from_numpy(values).bfloat16().double().numpy() - values
    assert np.square(error / factor).sum() < np.square(in_bfloat16 / factor).sum()


@pytest.mark.parametrize(
    ("block", "name", "settings"),
    [
        ((128, 128), "weight_scale_inv", FP8 | {"weight_block_size": [128, 128], "fmt": "e4m3"}),
        ((32, 48), "weight_scale_inv", FP8 | {"weight_block_size": [32, 48]}),
        ((1, 96), "weight_scale", FP8),
        ((ROWS, COLS), "weight_scale", FP8 | {"activation_scheme": "static"}),
        ((ROWS, COLS), "weight_scale_inv", FP8 | {"weight_block_size": None}),
        ((1, 96), "weight_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        ((1, 32), "weight_scale", compressed("float-quantized", **GROUPS | {"num_bits": 8, "type": "float"})),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_floats_are_multiplied_with_the_scale_of_their_block(tmp_path, block, name, settings, dtype):
    tensors, values = writers.fp8(_weight(), block, name=name, dtype=dtype)
    stored = _only(tmp_path, tensors, settings)
    np.testing.assert_array_equal(to_float32(stored), values.astype(np.float32))


@pytest.mark.parametrize("shape", [(), (1,), (ROWS,)])
def test_scales_of_8_bit_floats_may_come_without_a_second_dimension(tmp_path, shape):
    tensors, values = writers.fp8(_weight(), (1, COLS) if shape == (ROWS,) else (ROWS, COLS), name="weight_scale")
    tensors["weight_scale"] = tensors["weight_scale"].reshape(shape)
    np.testing.assert_array_equal(to_float32(_only(tmp_path, tensors, FP8)), values.astype(np.float32))


def test_all_8_bit_floats_are_those_of_torch(tmp_path):
    bits = torch.arange(256, dtype=torch.uint8).reshape(8, 32).view(torch.float8_e4m3fn)
    stored = _only(tmp_path, {"weight": bits, "weight_scale": torch.tensor(1.0)}, FP8)
    np.testing.assert_array_equal(to_float32(stored), bits.float().numpy())


def test_blocks_of_8_bit_floats_are_read_as_transformers_reads_them(tmp_path):
    tensors, _ = writers.fp8(_weight(256, 384), (128, 128), name="weight_scale_inv")
    expected = Fp8Dequantize(None)._dequantize_one(*tensors.values(), torch.float32)
    stored = _only(tmp_path, tensors, FP8 | {"weight_block_size": [128, 128]})
    np.testing.assert_array_equal(to_float32(stored), expected.numpy())


@pytest.mark.parametrize(
    ("case", "form", "weights", "encoding"),
    [
        ("group", "pack-quantized", GROUPS, "Q4_0"),
        ("group_asymmetric", "pack-quantized", GROUPS | {"symmetric": False}, "Q4_1"),
        ("channel_packed", "pack-quantized", {"num_bits": 4, "strategy": "channel"}, "Q4_0"),
        ("eight_packed", "pack-quantized", GROUPS | {"num_bits": 8}, "Q8_0"),
        ("int8", "int-quantized", {"num_bits": 8, "strategy": "channel"}, "Q8_0"),
        ("int8_asymmetric", "naive-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, "F32"),
        ("int8_whole", "int-quantized", {"num_bits": 8, "strategy": "tensor"}, "Q8_0"),
        ("fp8", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "F32"),
        ("fp8_whole", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, "F32"),
        (
            "fp8_block",
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 32]},
            "F32",
        ),
    ],
)
def test_what_compressed_tensors_wrote_is_read_as_it_reads_it(tmp_path, case, form, weights, encoding):
    tensors = {
        name.removeprefix(f"{case}."): tensor
        for name, tensor in load_file(GOLDEN).items()
        if name.startswith(f"{case}.")
    }
    expected = tensors.pop("expected").numpy()
    stored = _only(tmp_path, tensors, compressed(form, **weights))
    assert stored.encoding == encoding
    largest = np.abs(expected).max(axis=1, keepdims=True)
    lost = 2 * HALF * largest if encoding == "Q4_1" else 0  # offsets are rounded, all else is exact
    assert (np.abs(to_float32(stored) - expected) <= lost + 2.0**-23 * np.abs(expected)).all()


def test_older_files_of_compressed_tensors_name_the_group_of_each_input(tmp_path):
    order = np.random.default_rng(1).permutation(COLS)
    matrix = rounded(_weight(), size=32, order=order)
    tensors = writers.packed(matrix) | {"weight_g_idx": torch.from_numpy(matrix.group_of).int()}
    stored = _only(tmp_path, tensors, compressed("pack-quantized", **GROUPS, actorder="group"))
    np.testing.assert_array_equal(to_float32(stored), matrix.values())


def test_each_module_is_read_by_the_group_that_names_it_closest(tmp_path):
    four, eight = rounded(_weight(), size=32), rounded(_weight(), size=None, bits=8)
    floats, values = writers.fp8(_weight(), (1, COLS), name="weight_scale")
    settings = compressed("mixed-precision", num_bits=8, strategy="channel")
    settings["config_groups"] = {
        "all": {"targets": ["Linear"], "format": "int-quantized", "weights": {"num_bits": 8, "strategy": "channel"}},
        "some": {"targets": [r"re:.*\.down$"], "format": "pack-quantized", "weights": GROUPS},
        "one": {
            "targets": ["b.down"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
        "none": {"targets": ["re:.*"], "weights": None, "input_activations": {"num_bits": 8}},
    }
    parts = {"a.up": writers.int8(eight), "a.down": writers.packed(four), "b.down": floats}
    tensors = {f"{module}.{name}": tensor for module, found in parts.items() for name, tensor in found.items()}
    stored = _stored(writers.write(tmp_path / "m", tensors, settings))
    for module, expected in (("a.up", eight.values()), ("a.down", four.values()), ("b.down", values)):
        np.testing.assert_array_equal(to_float32(stored[f"{module}.weight"]), expected.astype(np.float32))


def test_what_is_not_quantised_is_read_as_ever(tmp_path):
    plain = torch.randn(4, 4).bfloat16()
    tensors = {"a.weight": plain, "b.bias": torch.ones(72)}
    tensors |= {f"b.{name}": tensor for name, tensor in writers.gptq(rounded(_weight(), size=32)).items()}
    stored = _stored(writers.write(tmp_path / "m", tensors, GPTQ))
    assert {name: one.encoding for name, one in stored.items()} == {
        "a.weight": "BF16",
        "b.weight": "Q4_0",
        "b.bias": "F32",
    }
    np.testing.assert_array_equal(to_float32(stored["a.weight"]), plain.float().numpy())


def test_a_module_s_tensors_may_lie_in_different_files(tmp_path):
    matrix = rounded(_weight(), size=32)
    stored = _only(tmp_path, writers.gptq(matrix), GPTQ, parts=4)
    np.testing.assert_array_equal(to_float32(stored), matrix.values())


def test_a_tensor_in_two_files_is_refused(tmp_path):
    source = _source(tmp_path, writers.gptq(rounded(_weight(), size=32)), GPTQ, parts=2)
    (source.path / "model-00003-of-00002.safetensors").symlink_to(source.path / "model-00002-of-00002.safetensors")
    with pytest.raises(StartupError, match=r"'a\.\w+' is also in model-00002"):
        list(iter_stored(source, model_config(source)))


@pytest.mark.parametrize("settings", [FP8, compressed("float-quantized", num_bits=8, type="float")])
def test_scales_of_activations_and_of_a_cache_are_left_out(tmp_path, settings):
    tensors, values = writers.fp8(_weight(), (ROWS, COLS), name="weight_scale")
    tensors["weight_scale"] = tensors["weight_scale"].reshape(1)
    names = ("input_scale", "k_scale", "v_scale")
    stored = _only(tmp_path, tensors | {name: torch.ones(1) for name in names}, settings)
    np.testing.assert_array_equal(to_float32(stored), values.astype(np.float32))


def test_settings_may_stand_in_the_config_of_the_language_model(tmp_path):
    matrix = rounded(_weight(), size=32)
    source = _source(tmp_path, writers.gptq(matrix), GPTQ)
    (stored,) = iter_stored(source, {"text_config": {"quantization_config": GPTQ}})
    np.testing.assert_array_equal(to_float32(stored), matrix.values())


def test_only_scales_and_zero_points_are_read_before_the_bytes_are_wanted(tmp_path):
    words = torch.full((512, 4096), 0x77777777, dtype=torch.int32)  # 8 MiB
    tensors = {"qweight": words, "qzeros": words[:4, :512].clone(), "scales": torch.ones(4, 4096).half()}
    source = _source(tmp_path, tensors, GPTQ | {"group_size": 1024})
    entries = list(iter_stored(source, model_config(source)))
    assert resident_kib(source.path / "model.safetensors") < 1000
    assert entries[0].data.size == 4096 * 4096 // 32 * 18


def _damaged(tensors, part, kind):
    """The tensors with this one missing, misshapen, of another type, or empty."""
    tensor = tensors[part]
    shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
    changed = {
        "missing": {},
        "misshapen": {part: torch.zeros(shape, dtype=tensor.dtype)},
        "of another type": {part: torch.zeros(tensor.shape, dtype=torch.int16)},
        "empty": {part: torch.zeros((*tensor.shape[:-1], 0), dtype=tensor.dtype)},
    }[kind]
    return {name: other for name, other in tensors.items() if name != part} | changed


def _damages():
    asymmetric = rounded(_weight(), size=32, symmetric=False)
    floats, _ = writers.fp8(_weight(), (24, 24), name="weight_scale_inv")
    for tensors, settings in (
        (writers.gptq(asymmetric), GPTQ),
        (writers.awq(asymmetric), AWQ),
        (writers.packed(asymmetric, symmetric=False), compressed("pack-quantized", **GROUPS, symmetric=False)),
        (writers.int8(rounded(_weight(), size=32, bits=8)), compressed("int-quantized", **GROUPS | {"num_bits": 8})),
        (floats, FP8 | {"weight_block_size": [24, 24]}),
    ):
        for part in tensors:
            for kind in ("missing", "misshapen", "of another type", "empty"):
                if (part, kind) != ("g_idx", "missing"):
                    method = settings["quant_method"]
                    yield pytest.param(tensors, settings, part, kind, id=f"{method}: {part} {kind}")


@pytest.mark.parametrize(("tensors", "settings", "part", "kind"), _damages())
def test_a_damaged_checkpoint_is_refused_by_tensor(tmp_path, tensors, settings, part, kind):
    message = _fault(tmp_path, _damaged(tensors, part, kind), settings)
    assert "model.safetensors: tensor 'a." in message
    assert "download the model again" in message
    assert f"'a.{part}'" in message or kind in ("misshapen", "empty")  # the shapes of others may be doubted first


def test_a_group_that_does_not_exist_is_refused(tmp_path):
    tensors = writers.gptq(rounded(_weight(), size=32))
    for wrong in (3, -1):
        tensors["g_idx"][5] = wrong
        assert "'a.g_idx' names group" in _fault(tmp_path, tensors, GPTQ)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    source = _source(tmp_path, writers.gptq(rounded(_weight(), size=32)), GPTQ)
    file = source.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(StartupError, match=r"model\.safetensors: corrupt"):
        list(iter_stored(source, model_config(source)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method: 'bitsandbytes' .* known: awq, compressed-tensors, .*gptq"),
        ({"bits": 4}, "quant_method: null"),
        (GPTQ | {"bits": 3}, "bits: 3 .* known: 4, 8"),
        (GPTQ | {"group_size": "128"}, "group_size: must be a positive integer or -1, got '128'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' .* known: gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: true"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype: 'int8'"),
        (GPTQ | {"dynamic": {r"+:.*down.*": {"bits": 8}}}, r"dynamic: the rule '\+:\.\*down"),
        (GPTQ | {"dynamic": 3}, "dynamic: must be an object, got 3"),
        (AWQ | {"bits": 8}, "bits: 8 .* known: 4"),
        (AWQ | {"version": "gemv"}, "version: 'gemv' .* known: gemm"),
        (AWQ | {"zero_point": False}, "zero_point: false"),
        (AWQ | {"backend": "llm-awq"}, "backend: 'llm-awq'"),
        (FP8 | {"fmt": "e5m2"}, "fmt: 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size: must be two positive integers, got "),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format: 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=3), "num_bits: 3 .* known: 4, 8"),
        (compressed("float-quantized", num_bits=4, type="float"), "num_bits: 4 .* known: 8"),
        (compressed("pack-quantized", num_bits=4, strategy="tensor_group"), "strategy: 'tensor_group'"),
        (compressed("int-quantized") | {"config_groups": {}}, "config_groups: names no group"),
        (
            compressed("int-quantized") | {"config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "config_groups: targets must be a list",
        ),
        (compressed("int-quantized") | {"config_groups": {"a": 4}}, "a: must be an object, got 4"),
        (
            compressed("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: format: 'sparse-24-bitmask'",
        ),
        (compressed("int-quantized") | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: "),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, settings, said):
    source = _source(tmp_path, {"weight": torch.ones(4, 4)}, settings)
    with pytest.raises(StartupError, match=f"config.json: quantization_config: {said}"):
        list(iter_stored(source, model_config(source)))


def test_a_quantised_module_that_no_group_names_is_refused(tmp_path):
    tensors = writers.int8(rounded(_weight(), size=32, bits=8))
    settings = compressed("int-quantized", **GROUPS | {"num_bits": 8})
    for target, said in (
        ("b", "config_groups: no group covers 'a'"),
        ("re:(", r"the target 're:\(' is not a valid pattern"),
    ):
        settings["config_groups"]["group_0"]["targets"] = [target]
        assert said.replace("\\", "") in _fault(tmp_path, tensors, settings)


def test_targets_that_take_others_for_ever_are_matched_in_linear_time_and_there_are_few(tmp_path):
    tensors = writers.int8(rounded(_weight(), size=32, bits=8))
    settings = compressed("int-quantized", **GROUPS | {"num_bits": 8})
    endless = "(" + "(.|.|.|.)+" * 9 + ")+!"
    settings["config_groups"]["group_0"]["targets"] = [f"re:{endless}"]
    name = "layer." * 20
    assert "no group covers" in _fault(tmp_path, {f"{name}{key}": value for key, value in tensors.items()}, settings)
    settings["config_groups"]["group_0"]["targets"] = ["re:a"] * 65
    assert "has 65 patterns; at most 64 are matched" in _fault(tmp_path, tensors, settings)


def _distances(reports, expected):
    """Between each reported log-probability and the expected one."""
    pairs = zip(reports, expected.tolist(), strict=True)
    return [abs(value - row[token]) for report, row in pairs for value, token in report.top]


def _rewritten(kind, weight):
    """A matrix as the checkpoint stores it, and its values."""
    if kind == "fp8":
        return writers.fp8(weight, (128, 128), name="weight_scale_inv", dtype=torch.bfloat16)
    bits, size = (8, None) if kind == "int8" else (4, 32)
    order = np.random.default_rng(0).permutation(weight.shape[1]) if kind == "gptq-act-order" else None
    matrix = rounded(weight, size=size, bits=bits, symmetric=kind != "awq", order=order)
    write = {"awq": writers.awq, "packed": writers.packed, "int8": writers.int8}.get(kind, writers.gptq)
    return write(matrix), matrix.values()


@pytest.fixture(
    scope="module",
    params=[
        ("gptq", GPTQ),
        ("gptq-act-order", GPTQ | {"desc_act": True}),
        ("awq", AWQ),
        ("fp8", FP8 | {"weight_block_size": [128, 128]}),
        ("packed", compressed("pack-quantized", **GROUPS)),
        ("int8", compressed("int-quantized", num_bits=8, strategy="channel")),
    ],
    ids=lambda param: param[0],
)
def quantised_model(request, tmp_path_factory):
    """A folder, and transformers' model with the values that its matrices stand for."""
    kind, settings = request.param
    folder = tmp_path_factory.mktemp(kind)
    oracle = tiny_models.write(folder, "qwen3")
    tensors = {}
    state = oracle.state_dict()
    for name, value in state.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = value.clone()
            continue
        parts, values = _rewritten(kind, value.double().numpy())
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        value.copy_(torch.from_numpy(values))
    if kind == "gptq":  # as AutoGPTQ writes them
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
    return writers.write(folder, tensors, settings), oracle


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_quantised_model_answers_as_transformers_with_the_same_values(quantised_model, kernels):
    if kernels == "native":
        pytest.importorskip("tureen.kernels.cpu._native")
    source, oracle = quantised_model
    config = Config(device="cpu", dtype="float32", kernels=kernels, max_total_tokens=256, num_threads=1)
    runner = load_runner(source, config)
    sequence = Running(0, PROMPT, range(8), logprobs=LogprobSpec(prompt_start=0, top=256))
    assert generate(runner, sequence, 12, score=True) == tiny_models.greedy(oracle, PROMPT, 12, draft=sequence.output)
    expected = tiny_models.logprobs(oracle, sequence.token_ids[:-1])
    reports = sequence.prompt_logprobs + sequence.output_logprobs
    close = 1e-2 if model_config(source)["quantization_config"] == AWQ else 2e-4  # offsets are rounded to float16
    assert max(_distances(reports, expected)) < close


def test_native_kernels_keep_the_integers_of_a_quantised_model(quantised_model):
    if native.load() is None:
        pytest.skip("the native kernels were not built")
    source, oracle = quantised_model
    runner = load_runner(source, Config(device="cpu", kernels="native", max_total_tokens=256, num_threads=1))
    blocks = {stored.encoding for stored in iter_stored(source, model_config(source)) if stored.encoding[0] == "Q"}
    assert runner.forward.dtype.upper() in (blocks or {"BF16"})
    sequence = Running(0, PROMPT, range(8), logprobs=LogprobSpec(prompt_start=0, top=256))
    generate(runner, sequence, 1, score=True)
    expected = tiny_models.logprobs(oracle, sequence.token_ids[:-1])
    reports = sequence.prompt_logprobs + sequence.output_logprobs
    assert np.mean(_distances(reports, expected)) < 0.05


def _mxfp4(shape):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)


def test_experts_in_mxfp4_have_the_values_that_transformers_computes(tmp_path):
    stacks = {"gate_up_proj": _mxfp4((3, 24, 4)), "down_proj": _mxfp4((3, 8, 2))}
    tensors = {f"{name}_blocks": blocks for name, (blocks, _) in stacks.items()}
    tensors |= {f"{name}_scales": scales for name, (_, scales) in stacks.items()}
    bias = torch.randn(3, 24).to(torch.bfloat16)
    source = _source(tmp_path, tensors | {"gate_up_proj_bias": bias}, {"quant_method": "mxfp4"})
    stored = _stored(source)
    assert set(stored) == {"a.gate_up_proj.weight", "a.down_proj.weight", "a.gate_up_proj_bias"}
    for name, (blocks, scales) in stacks.items():
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        one = stored[f"a.{name}.weight"]
        assert (one.encoding, one.shape) == ("MXFP4", tuple(expected.shape))
        np.testing.assert_array_equal(to_float32(one), expected.numpy())
        packed = native.require().Matrix.pack(native.require().Pool(1), one.data, "MXFP4", "MXFP4",
                                              expected.shape[0] * expected.shape[1], expected.shape[2])  # fmt: skip
        np.testing.assert_array_equal(packed.unpack().reshape(expected.shape), expected.numpy())


@pytest.mark.parametrize(
    ("blocks", "scales", "fault"),
    [
        ((2, 8, 16), (2, 8), r"has shape \[2, 8, 16\], not \[experts, rows, groups, 16\]"),
        ((2, 8, 1, 8), (2, 8, 1), r"has shape \[2, 8, 1, 8\]"),
        ((2, 8, 1, 16), (2, 8, 2), r"has shape \[2, 8, 2\], not \[2, 8, 1\]"),
        ((2, 8, 1, 16), None, "'a.x_scales' is missing"),
    ],
)
def test_misshapen_mxfp4_is_named(tmp_path, blocks, scales, fault):
    tensors = {"x_blocks": torch.zeros(blocks, dtype=torch.uint8)}
    if scales:
        tensors["x_scales"] = torch.zeros(scales, dtype=torch.uint8)
    assert re.search(fault, _fault(tmp_path, tensors, {"quant_method": "mxfp4"}))
