"""Marks that several files share."""

import pytest

TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
# torch itself still calls its older compiler in places.
TORCH_JIT = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
