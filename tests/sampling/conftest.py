import pytest
from arithmetics import hold


@pytest.fixture(scope="module", params=["torch", "native"])
def each_arithmetic(request):
    """Twice: with torch, and with the native kernels."""
    hold(request.param)
