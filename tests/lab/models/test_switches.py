"""The models' own kernels can be switched off, and are not imported before they run."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("1", True), ("0", False)])
@pytest.mark.parametrize("name", ["narrow_conv", "max_pool", "stem_conv"])
def test_switch_and_import_without_triton(name, value, enabled):
    code = (
        f"import sys; from modenorm.lab.models import {name} as m; "
        "print(m.ENABLED, 'triton' in sys.modules)"
    )
    switch = f"MODENORM_{name.upper()}"
    environment = {k: v for k, v in os.environ.items() if k != switch}
    if value is not None:
        environment[switch] = value
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(enabled), "False"]
