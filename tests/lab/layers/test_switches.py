"""The models' own kernels can be switched off, and are not imported before they run."""

import os
import subprocess
import sys

import pytest

NAMES = (
    "narrow_conv", "max_pool", "small_conv", "stem_conv", "padded_conv", "avg_pool", "batch_norm",
)  # fmt: skip


@pytest.mark.parametrize("bit", [None, 0, 1, 2])
def test_switches_and_import_without_triton(bit):
    """No two of them are switched by one: their numbers differ in a bit."""
    values = (
        {name: str(number >> bit & 1) for number, name in enumerate(NAMES)}
        if bit is not None
        else {}
    )
    code = (
        f"import sys; from modenorm.lab.layers import {', '.join(NAMES)}; "
        f"print({', '.join(f'{name}.ENABLED' for name in NAMES)}, 'triton' in sys.modules)"
    )
    switches = {f"MODENORM_{name.upper()}": name for name in NAMES}
    environment = {k: v for k, v in os.environ.items() if k not in switches}
    environment |= {switch: values[name] for switch, name in switches.items() if name in values}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    enabled = [str(values.get(name) != "0") for name in NAMES]
    assert done.stdout.split() == [*enabled, "False"]
