"""What tests of runners share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Ranks and the model in one process add up in the same order only with as many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
