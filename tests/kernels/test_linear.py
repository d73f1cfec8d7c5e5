import pytest
import torch
from torch.nn import functional

from tureen.devices.base import resolve_device
from tureen.kernels.linear import can_pack, linear, pack


def cancelling(rows, size, dtype):
    """Inputs and weights whose products nearly cancel: what is left shows every rounding of the sum."""
    generator = torch.Generator().manual_seed(size)
    half = torch.randn(48, size // 2, generator=generator)
    x = torch.randn(rows, size // 2, generator=generator)
    other = x + 1e-3 * torch.randn(x.shape, generator=generator)
    return torch.cat((x, other), 1).to(dtype), torch.cat((half, -half), 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 576, 1536, 4096])
def test_a_row_gives_the_same_bits_among_any_number_of_rows(size, dtype):
    x, weight = cancelling(700, size, dtype)
    if not can_pack(weight):
        pytest.skip("no fast path for this type on this machine")
    packed, bias = pack(weight.clone()), torch.arange(48, dtype=dtype)
    expected = linear(x, packed, bias)
    for rows in (1, 2, 3, 7, 8, 16, 17, 33, 64, 100, 257, 512, 699):
        assert torch.equal(linear(x[:rows].contiguous(), packed, bias), expected[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_packed_weights_give_what_plain_ones_give(rows, dtype):
    device = torch.device(resolve_device("auto").name)
    x, weight = torch.randn(rows, 1200, device=device).to(dtype), torch.randn(30, 1200, device=device).to(dtype)
    bias = torch.randn(30, device=device).to(dtype)
    close = {torch.float32: 1e-4}.get(dtype, 0.6)
    expected = functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(linear(x, pack(weight.clone()), bias).float(), expected, atol=close, rtol=1e-2)
    torch.testing.assert_close(linear(x, weight, bias).float(), expected, atol=close, rtol=1e-2)
