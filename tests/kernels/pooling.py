"""What the tests of both poolings share: sizes, images, and a function's output and gradient."""

import pytest
import torch

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
# One pixel, one row, one column; even and odd; more columns and more rows than a program takes.
SMALL = [(1, 1, 1, 1), (2, 8, 1, 7), (2, 16, 6, 1), (3, 8, 8, 8), (2, 16, 7, 5), (2, 8, 6, 9)]
SMALL += [(3, 24, 7, 15)]


def images(shape, device, dtype=torch.bfloat16):
    x = torch.randn(shape, device=device, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


def gradient(function, x, dy):
    """Y and dx."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, dy.to(y.dtype))[0]
