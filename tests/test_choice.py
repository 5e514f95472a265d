"""Which code serves a call."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from modenorm import use_backend
from modenorm.kernels import choice
from modenorm.kernels.choice import FUSED, choose_kernels, choose_path


def images(dtype=torch.float32):
    return torch.randn(4, 3, 2, 2, dtype=dtype)


def test_a_fused_path_is_that_of_the_tensors():
    compiled = choice.cpu_kernels().startswith("compiled")
    assert choose_path(images()) == choose_kernels(images()) == ("c" if compiled else "torch")
    for other in (images(torch.float64), images(torch.bfloat16)):
        assert choose_path(other) == choose_kernels(images(), other) == "torch"


def test_plain_operators_where_torch_looks_on():
    paths = [choose_path(images(), plain_only=True)]
    make_fx(lambda x: paths.append(choose_path(x)) or x)(images())
    torch.func.vmap(lambda x: paths.append(choose_path(x)) or x)(images())
    with forward_ad.dual_level():
        paths.append(choose_path(images()))
    assert paths == ["eager"] * 4
    assert choose_path(images()) in FUSED


@pytest.mark.parametrize(("backend", "path"), [
    ("auto", "operators"), ("fused", "operators"), ("eager", "eager"), ("reference", "reference"),
])  # fmt: skip
def test_compiled_calls(backend, path, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with use_backend(backend):
        assert choose_path(images()) == (path if backend == "reference" else "eager")
        monkeypatch.setattr(choice, "runs_operators", lambda x: True)
        assert choose_path(images()) == path
        assert choose_path(images(), plain_only=True) in ("eager", "reference")
