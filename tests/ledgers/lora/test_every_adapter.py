"""Adapters with every architecture and both kinds of kernels; tests/lora has each of them once."""

import sys
from pathlib import Path

import pytest
from tiny_models import VARIANTS

sys.path.append(str(Path(__file__).parents[2] / "lora"))
from test_adapters_in_batches import KERNELS, check_architecture, check_bits, runner, written  # noqa: F401 - fixtures

GUARDS = ("attention", "kernels", "layers", "lora", "models", "runner")


@pytest.mark.parametrize("adapter", range(4))
def test_the_bits_of_every_adapter_do_not_depend_on_company(runner, adapter):  # noqa: F811
    check_bits(runner, adapter)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_architecture_takes_adapters_with_both_kinds_of_kernels(kernels, variant, tmp_path):
    check_architecture(kernels, variant, tmp_path)
