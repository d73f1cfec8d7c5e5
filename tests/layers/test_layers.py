import pytest
import torch
from torch.nn import functional

from tureen.layers.activation import gelu_tanh_and_mul, sigmoid, silu_and_mul, tanh
from tureen.layers.norm import RMSNorm
from tureen.layers.rope import RopeConfig
from tureen.layers.rotary import RopeTable, Rotation, rotate

ROWS = (1, 2, 3, 5, 16, 33, 99, 100, 299)


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [96, 1152, 1280, 8192])
def test_a_row_gives_the_same_bits_among_any_number_of_rows(size, dtype):
    x = torch.randn(300, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    norm = RMSNorm(size, 1e-5)
    dict(norm.weights("norm"))["norm.weight"].uniform_(0.5, 2)
    for function in (silu_and_mul, gelu_tanh_and_mul, sigmoid, tanh, norm):
        expected = function(x)
        for rows in ROWS:
            assert torch.equal(function(x[:rows]), expected[:rows])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [sigmoid, tanh], ids=lambda function: function.__name__)
def test_one_number_a_row_gives_the_same_bits_among_any_number_of_rows(function, dtype):
    x = torch.randn(4096, 1, generator=torch.Generator().manual_seed(1)).mul_(4).to(dtype)
    expected = function(x)
    for rows in (*ROWS, 4095):
        assert torch.equal(function(x[-rows:]), expected[-rows:])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("head_dim", [20, 64])
def test_a_rotated_token_is_the_same_among_any_number_of_tokens(head_dim):
    x = torch.randn(300, 9, head_dim, generator=torch.Generator().manual_seed(1))
    rotation = RopeTable(RopeConfig(theta=10000.0), head_dim, 300, torch.device("cpu")).at(torch.arange(300))
    expected = rotate(x, rotation)
    for rows in ROWS:
        assert torch.equal(rotate(x[:rows], Rotation(rotation.cos[:rows], rotation.sin[:rows], False)), expected[:rows])


@pytest.mark.usefixtures("threads")
def test_adding_a_multiple_in_place_gives_the_same_bits_among_any_number_of_rows():
    x, y = (torch.randn(300, 1153, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    expected = x.clone().add_(y, alpha=0.22)
    for rows in ROWS:
        assert torch.equal(x[:rows].clone().add_(y[:rows], alpha=0.22), expected[:rows])


def test_gated_activations_multiply_the_activated_first_half_by_the_second():
    x = torch.randn(7, 20, dtype=torch.float64)
    gate, up = x[:, :10], x[:, 10:]
    torch.testing.assert_close(silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)
    torch.testing.assert_close(gelu_tanh_and_mul(x), functional.gelu(gate, approximate="tanh") * up)


def test_the_norm_equals_its_definition():
    x, weight = torch.randn(5, 48) * 3, torch.rand(48)
    norm = RMSNorm(48, 1e-3)
    dict(norm.weights("norm"))["norm.weight"].copy_(weight)
    expected = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-3) * weight.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-6)


def test_rotation_turns_each_pair_by_its_position_times_its_frequency():
    config, positions = RopeConfig(theta=1000.0, kind="linear", factor=2.0), torch.tensor([0, 3, 17])
    x = torch.randn(3, 2, 8)
    rotation = RopeTable(config, 8, 32, torch.device("cpu")).at(positions)
    angles = positions[:, None] / 2.0 * 1000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turned = torch.view_as_complex(torch.stack((x[..., :4], x[..., 4:]), -1).double()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, rotation).double(), expected, atol=1e-6, rtol=1e-6)
