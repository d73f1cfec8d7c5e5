"""Grids of vectors are stretched and shrunk as torch does it."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tureen.kernels.cpu import native
from tureen.vision.native_arrays import NativeArrays
from tureen.vision.resampling import cubic_taps, linear_taps, resampled
from tureen.vision.torch_arrays import TorchArrays

SIZES = [((16, 16), (9, 24)), ((5, 7), (14, 3)), ((1, 4), (6, 1)), ((27, 27), (27, 28))]
MODES = {
    "bicubic": (cubic_taps, {"mode": "bicubic"}),
    "bilinear": (linear_taps, {"mode": "bilinear"}),
    "bilinear that keeps ends": (
        lambda old, new: linear_taps(old, new, keeps_ends=True),
        {"mode": "bilinear", "align_corners": True},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("old", "new"), SIZES)
def test_several_grids_are_resampled_as_torch_does_it(old, new, mode, dtype):
    grids = torch.randn((2, *old, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    taps, options = MODES[mode]
    expected = functional.interpolate(grids.double().permute(0, 3, 1, 2), new, **options).permute(0, 2, 3, 1)
    down, across = (taps(*sizes) for sizes in zip(old, new, strict=True))
    found = resampled(TorchArrays(torch.device("cpu"), dtype), grids, down, across)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, atol=1e-2 if dtype == torch.bfloat16 else 2e-6, rtol=1e-2)
    assert dtype == torch.bfloat16 or np.allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.skipif(native.load() is None, reason="no native kernels")
@pytest.mark.parametrize("mode", MODES)
def test_numpy_and_torch_resample_one_grid_to_the_same_bits(mode):
    grid = np.random.default_rng(0).standard_normal((6, 7, 3)).astype(np.float32)
    taps = MODES[mode][0](6, 9), MODES[mode][0](7, 4)
    found = resampled(TorchArrays(torch.device("cpu"), torch.float32), torch.from_numpy(grid), *taps)
    assert np.array_equal(resampled(NativeArrays(native.require(), 1, "float32"), grid, *taps), found.numpy())
