import pytest
import torch
from torch.nn import functional

from tureen.devices.base import resolve_device
from tureen.kernels.linear import _cancelling, linear, pack


def cancelling(rows, size, dtype):
    """Inputs and weights whose products nearly cancel: what is left shows every rounding of the sum."""
    generator = torch.Generator().manual_seed(size)
    half = torch.randn(48, size // 2, generator=generator)
    x = torch.randn(rows, size // 2, generator=generator)
    other = x + 1e-3 * torch.randn(x.shape, generator=generator)
    return torch.cat((x, other), 1).to(dtype), torch.cat((half, -half), 1).to(dtype)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 576, 1536, 4096])
def test_a_row_gives_the_same_bits_among_any_number_of_rows(size, dtype, is_packed):
    x, weight = cancelling(700, size, dtype)
    bias = torch.arange(48, dtype=dtype)
    given = pack(weight.clone(), bias) if is_packed else weight
    expected = linear(x, given, bias)
    for rows in (1, 2, 3, 7, 8, 16, 17, 33, 64, 100, 257, 512, 699):
        assert torch.equal(linear(x[:rows].contiguous(), given, bias), expected[:rows])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [1, 1536])
def test_a_row_gives_the_same_bits_at_any_place(outputs, dtype):
    x, weight = cancelling(40, 576, dtype)
    weight = pack(weight.repeat(outputs // 48 + 1, 1)[:outputs])
    expected = linear(x[:1], weight)
    for place in (1, 2, 5, 16, 31, 39):
        assert torch.equal(linear(x.roll(place, 0), weight)[place], expected[0])


@pytest.mark.parametrize("shape", [(64, 48), (1, 3), (7, 1), (2048, 2100)])
def test_of_the_probe_s_products_nothing_is_left_but_rounding(shape):
    rows, weight = _cancelling(*shape, torch.bfloat16)
    exact = rows.double() @ weight.double().T
    assert rows.shape == (3, shape[0])
    assert weight.shape == shape[::-1]
    assert exact.abs().max() < 1e-12


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
