"""The package as users get it: public names, cheap imports, a wheel that works."""

import ast
import inspect
import subprocess
import sys
import sysconfig
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import modenorm
from modenorm import functional, gates, reference
from modenorm.kernels.c import library as c_library

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "modenorm"

PUBLIC_NAMES = {
    "LinearGate",
    "ModeGroupNorm",
    "ModeNorm1d",
    "ModeNorm2d",
    "ModeNorm3d",
    "ModeSparsity",
    "StandardizedGate",
    "convert_sync_modenorm",
    "freeze_statistics",
    "functional",
    "gates",
    "match_modes",
    "mode_report",
    "norm_parameters",
    "prune_modes",
    "recalibrate",
    "record_gates",
    "reference",
    "replace_batchnorm",
    "to_batchnorm",
    "use_backend",
}


def test_public_names():
    assert set(modenorm.__all__) == PUBLIC_NAMES
    assert modenorm.__all__ == sorted(modenorm.__all__)
    assert functional.__all__ == ["mode_group_norm", "mode_norm"]
    assert reference.__all__ == ["mode_group_norm", "mode_norm"]
    assert gates.__all__ == ["LinearGate", "StandardizedGate", "make_gate"]


def source_files(folder):
    found = [path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h", ".cpp")]
    return [path for path in found if path.stem != "__init__"]


def test_the_map_of_the_kernels_names_every_file():
    folder, lines = SOURCE / "kernels", modenorm.kernels.__doc__.partition("to read it:")[2]
    rows = [line for line in lines.splitlines() if line.startswith("    ")]
    names = [name for row in rows for name in row.strip().split("  ")[0].split(", ")]
    files = {path.relative_to(folder).with_suffix("").as_posix() for path in source_files(folder)}
    unknown = {file for file in files if not any(fnmatch(file, name) for name in names)}
    assert not unknown
    assert all(any(fnmatch(file, name) for file in files) for name in names)


SIGNATURES = {
    modenorm.ModeNorm2d: "num_features, num_modes=2, eps=1e-05, momentum=0.1, affine=True, "
    "track_running_stats=True, *, gate=None, per_mode_affine=False, running_update='paper', "
    "device=None, dtype=None",
    modenorm.ModeNorm2d.forward: "self, x, gates=None, mask=None, *, relu=False",
    modenorm.ModeGroupNorm: "num_channels, num_modes=2, eps=1e-05, affine=True, *, "
    "variance='pooled', device=None, dtype=None",
    functional.mode_norm: "x, gates, running_mean=None, running_var=None, weight=None, bias=None, "
    "training=False, momentum=0.1, eps=1e-05, *, mask=None, running_update='paper', "
    "num_batches_tracked=None, running_share=None",
    functional.mode_group_norm: "x, gate_weight, gate_bias, weight=None, bias=None, eps=1e-05, *, "
    "variance='pooled'",
}


@pytest.mark.parametrize(("function", "text"), SIGNATURES.items(), ids=lambda v: str(v)[:20])
def test_signatures(function, text):
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(parameters)) == f"({text})"


DOCUMENTED = [
    f"{module.__name__}.{name}"
    for module in (modenorm, functional, reference, gates)
    for name in module.__all__
    if not inspect.ismodule(getattr(module, name))
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_docstring_has_an_example(name):
    module, _, attribute = name.rpartition(".")
    documented = getattr(sys.modules[module], attribute)
    assert ">>>" in (documented.__doc__ or ""), f"{name} has no example"


# What `import modenorm` loads, beyond what `import torch` loads anyway.
IMPORTED = """
import sys
import torch
before = set(sys.modules)
{statement}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
loaded |= {{name for name in set(sys.modules) - before if name.startswith("modenorm.")}}
print(*sorted(loaded))
"""


def modules_loaded_by(statement: str) -> set[str]:
    code = IMPORTED.format(statement=statement)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


def foreign(modules: set[str]) -> set[str]:
    allowed = set(sys.stdlib_module_names) | {"torch", "modenorm"}
    return {name for name in modules if not name.startswith("modenorm.")} - allowed


def test_import_loads_nothing_but_torch():
    modules = modules_loaded_by("import modenorm")
    assert foreign(modules) == set()
    assert not {name for name in modules if name.startswith("modenorm.lab")}
    assert "triton" not in modules


def test_a_cpu_step_loads_nothing_but_torch():
    step = "import modenorm; modenorm.ModeNorm2d(3)(torch.randn(4, 3, 2, 2)).sum().backward()"
    assert "triton" not in modules_loaded_by(step)


def test_the_import_check_can_fail():
    assert foreign(modules_loaded_by("import modenorm, hypothesis")) >= {"hypothesis"}
    assert "modenorm.lab" in modules_loaded_by("import modenorm, modenorm.lab")


def lab_imports(code: str) -> list[int]:
    """Lines that import the laboratory."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(f"{name}.".startswith("modenorm.lab.") for name in names):
            lines.append(node.lineno)
    return lines


LIBRARY = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if "lab" not in path.relative_to(SOURCE).parts and path.name != "__main__.py"
]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_library_never_imports_the_laboratory(path):
    assert lab_imports(path.read_text()) == []


@pytest.mark.parametrize(
    "code",
    ["import modenorm.lab", "from modenorm import lab", "from modenorm.lab.cli import main"],
)
def test_the_laboratory_check_can_fail(code):
    assert lab_imports(f"def f():\n    {code}") == [2]


def test_the_command_line_starts_in_the_laboratory():
    assert lab_imports((SOURCE / "__main__.py").read_text()) != []


USE = """
import torch, modenorm
assert "{installed}" in modenorm.__file__, modenorm.__file__
layer = modenorm.ModeNorm2d(8)
layer(torch.randn(4, 8, 5, 5)).square().sum().backward()
assert layer.num_batches_tracked == 1
print("works", modenorm.__version__)
"""


@pytest.mark.slow
def test_wheel_installs_into_an_empty_environment(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("modenorm-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {Path(name).name for name in packed.namelist()}
    assert {path.name for path in c_library.SOURCES} <= names
    empty = tmp_path / "empty"
    venv.create(empty, with_pip=True)
    python = empty / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = empty.glob("lib/python*/site-packages")
    without_torch = subprocess.run(
        [python, "-c", "import modenorm"], capture_output=True, text=True, cwd=tmp_path
    )
    assert "No module named 'torch'" in without_torch.stderr
    (site / "torch_from_here.pth").write_text(sysconfig.get_path("purelib"))
    result = subprocess.run(
        [python, "-c", USE.format(installed=empty.name)],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.stdout.split() == ["works", modenorm.__version__]


def test_the_wheel_is_typed_and_licensed():
    assert (SOURCE / "py.typed").exists()
    assert (ROOT / "LICENSE").read_text().startswith("MIT")
