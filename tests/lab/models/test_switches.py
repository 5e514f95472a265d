"""The models' own kernels can be switched off, and are not imported before they run."""

import os
import subprocess
import sys

import pytest

NAMES = ("narrow_conv", "max_pool", "small_conv", "stem_conv", "padded_conv", "avg_pool")


@pytest.mark.parametrize(
    ("switched", "value"), [((), None), (NAMES, "1"), *(((name,), "0") for name in NAMES)]
)
def test_switches_and_import_without_triton(switched, value):
    """One of them switched off leaves the others on."""
    code = (
        f"import sys; from modenorm.lab.models import {', '.join(NAMES)}; "
        f"print({', '.join(f'{name}.ENABLED' for name in NAMES)}, 'triton' in sys.modules)"
    )
    switches = {f"MODENORM_{name.upper()}": name for name in NAMES}
    environment = {k: v for k, v in os.environ.items() if k not in switches}
    environment |= {switch: value for switch, name in switches.items() if name in switched}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    enabled = [str(value != "0" or name not in switched) for name in NAMES]
    assert done.stdout.split() == [*enabled, "False"]
