"""One thread, one seed: every test sees the same numbers wherever it runs."""

import pytest
import torch

import modenorm

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["eager", "fused"])
def backend(request):
    with modenorm.use_backend(request.param):
        yield request.param
