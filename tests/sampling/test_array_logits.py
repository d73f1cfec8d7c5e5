"""Logits without torch: each method gives what the tensor's method of the same name gives."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from tureen.sampling import array_logits, array_module, tensor_logits

INF = float("inf")
STAND_IN = array_module.modules()["torch"]


def _values():
    """Rows with equal numbers, infinities and all signs."""
    values = np.random.default_rng(5).standard_normal((3, 7)).astype(np.float32)
    values[0, 2] = -INF
    values[1, 4] = values[1, 5]
    return values


def _documented(logits, torch):
    keep = logits[0, [1, 3]].clone()
    logits[0] = -float("inf")
    logits[0, [1, 3]] = keep
    return logits


def _in_order(ranked):
    return list(ranked)


CALLS = {
    "the documentation's own class": _documented,
    "size": lambda x, torch: x.new_tensor([x.size(0), x.size()[1], x.dim(), x.numel(), len(x)]),
    "float": lambda x, torch: (x > 0).float(),
    "long": lambda x, torch: (x > 0).long(),
    "half": lambda x, torch: x.half().float(),
    "double": lambda x, torch: x.double() * 2,
    "to": lambda x, torch: x.to(torch.float64).to(x.device),
    "numpy": lambda x, torch: x.numpy() * 3,
    "masked_fill_": lambda x, torch: x.masked_fill_(x > 0.2, -1.0),
    "masked_fill": lambda x, torch: x.masked_fill(x > 0.2, -1.0),
    "fill_ of a slice": lambda x, torch: [x[1].fill_(4.0), x],
    "zero_": lambda x, torch: x[:, 2:4].zero_(),
    "copy_": lambda x, torch: x[0].copy_(x[1]),
    "index_fill_": lambda x, torch: x.index_fill_(1, torch.tensor([0, 3]), -2.0),
    "scatter_": lambda x, torch: x.scatter_(1, torch.tensor([[0], [1], [6]]), 9.0),
    "scatter_ of values": lambda x, torch: x.scatter_(1, torch.tensor([[0, 2]] * 3), torch.ones(3, 2)),
    "scatter": lambda x, torch: x.scatter(1, torch.tensor([[0], [1], [6]]), 9.0),
    "scatter_add_": lambda x, torch: x.scatter_add_(1, torch.tensor([[1, 1]] * 3), torch.ones(3, 2)),
    "gather": lambda x, torch: x.gather(1, torch.tensor([[0, 6], [2, 2], [5, 1]])),
    "index_select": lambda x, torch: x.index_select(1, torch.tensor([6, 0])),
    "clamp": lambda x, torch: [x.clamp(-1, 0.5), x.clamp(min=0), x.clamp_(max=0.1)],
    "softmax": lambda x, torch: [x.softmax(-1), torch.softmax(x, dim=0), torch.nn.functional.softmax(x, dim=-1)],
    "log_softmax": lambda x, torch: [x.log_softmax(dim=-1), torch.log_softmax(x, -1)],
    "logsumexp": lambda x, torch: [x.logsumexp(1), x.logsumexp(-1, keepdim=True)],
    "topk": lambda x, torch: [*_in_order(x.topk(2)), *_in_order(torch.topk(x, 3, dim=0, largest=False))],
    "sort": lambda x, torch: [x.sort().values, *_in_order(torch.sort(x[2], descending=True))],
    "argsort": lambda x, torch: [x[2].argsort(), x[2].argsort(descending=True)],
    "max": lambda x, torch: [x.max(), *_in_order(x.max(dim=-1)), torch.max(x, 1, keepdim=True).values],
    "min": lambda x, torch: [x[1:].min(), *_in_order(x[1:].min(0))],
    "argmax": lambda x, torch: [x.argmax(), x.argmax(-1), x.argmax(dim=0, keepdim=True)],
    "sum": lambda x, torch: [x[1:].sum(), x[1:].sum(dim=-1), x[1:].sum(0, keepdim=True)],
    "mean, std": lambda x, torch: [x[1:].mean(-1), x[1:].std(dim=-1), x[1:].var()],
    "cumsum": lambda x, torch: [x[1:].cumsum(-1), torch.cumsum(x[1:], dim=0)],
    "any, all": lambda x, torch: [(x > 1).any(), (x > -9).all(dim=-1)],
    "arithmetic": lambda x, torch: [x + 1, 2 * x, x / 2, -x, x - x[1], x**2, x.add(1), x.mul(x)],
    "arithmetic in place": lambda x, torch: [x.mul_(2), x.add_(1), x.div_(3), x.sub_(0.5)],
    "functions": lambda x, torch: [x.exp(), torch.abs(x), x.tanh(), x.sigmoid(), x.abs().sqrt(), x.neg()],
    "comparisons": lambda x, torch: [x.eq(x), x.lt(0), x > 0, torch.isinf(x), x.isnan(), torch.isfinite(x)],
    "where": lambda x, torch: [torch.where(x > 0, x, torch.zeros_like(x)), x.where(x > 0, -1.0)],
    "nonzero": lambda x, torch: [(x > 0).nonzero(), torch.nonzero(x < 0)],
    "shape": lambda x, torch: [x.view(-1), x.view(7, 3), x.unsqueeze(0), x[0].expand(2, -1), x.repeat(1, 2), x.T],
    "cat": lambda x, torch: [torch.cat([x, x], dim=1), torch.stack([x, x])],
    "made": lambda x, torch: [torch.zeros(2, 3), torch.ones((2, 2)), torch.full((2,), -INF), torch.full_like(x, 2.0)],
    "tensor": lambda x, torch: [torch.tensor([1, 2]), torch.tensor([0.5, 1.0], device=x.device, dtype=x.dtype)],
    "arange": lambda x, torch: [torch.arange(5), torch.arange(1, 3)],
    "new": lambda x, torch: [x.new_full((2, 2), 3.0), x.new_zeros(2, 3)],
    "numpy's own": lambda x, torch: [np.sort(x.numpy(), axis=-1), np.max(x.numpy(), axis=0)],
    "no_grad": lambda x, torch: _under(torch.no_grad(), x),
    "masks as indices": lambda x, torch: _with_mask(x),
}


def _under(context, x):
    with context:
        return x * 2


def _with_mask(x):
    x[x < x.max(dim=-1, keepdim=True).values] = -INF
    return x


def _plain(result):
    parts = result if isinstance(result, list) else [result]
    return [np.asarray(part) for part in parts]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_it_gives_with_a_tensor(name):
    with torch.no_grad():
        tensor, array = torch.from_numpy(_values()), array_logits.from_array(_values())
        expected, got = _plain(CALLS[name](tensor, torch)), _plain(CALLS[name](array, STAND_IN))
    assert len(got) == len(expected)
    for mine, its in zip(got, expected, strict=True):
        assert mine.shape == its.shape
        assert mine.dtype.kind == its.dtype.kind
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(array), tensor.numpy(), rtol=1e-5)  # what was changed in place


def test_numpy_s_own_functions_take_such_logits():
    plain, array = _values()[1:], array_logits.from_array(_values()[1:])
    for function in (np.sort, np.argsort, np.max, np.argmax, np.sum, np.mean, np.cumsum, np.any):
        np.testing.assert_array_equal(np.asarray(function(array, axis=-1)), function(plain, axis=-1))


@pytest.mark.parametrize("call", [lambda x: x.multinomial(1), lambda x: STAND_IN.multinomial(x, 1)])
def test_what_is_not_there_says_so_and_how_to_get_it(call):
    with pytest.raises(AttributeError, match=r"multinomial.*pip install 'tureen\[torch\]'"):
        call(array_logits.from_array(_values()))


def test_such_logits_can_be_printed():
    assert "-1.5" in str(array_logits.from_array(np.array([[-1.5, 2.0]])))


@pytest.mark.parametrize("kind", [array_logits, tensor_logits])
def test_the_first_use_of_everything_needs_nothing_else(kind):
    kind.warm_up()


@pytest.mark.parametrize("kind", [array_logits, tensor_logits])
def test_results_are_taken_over_or_named(kind):
    rows = kind.from_array(_values())
    kind.take_over(_values() * 2, rows)
    np.testing.assert_array_equal(np.asarray(rows), _values() * 2)
    for wrong, error, text in (
        (5, TypeError, "returned int"),
        (None, TypeError, "NoneType"),
        (_values()[:, :3], ValueError, r"\[3, 3\], not \[3, 7\]"),
    ):
        with pytest.raises(error, match=text):
            kind.take_over(wrong, rows)


def test_every_function_of_the_stand_in_is_a_method_of_a_tensor():
    for name in array_module.FUNCTIONS:
        assert callable(getattr(torch.Tensor, name, None) or getattr(torch, name)), name
        assert not inspect.isdatadescriptor(getattr(array_logits.ArrayLogits, name)), name
