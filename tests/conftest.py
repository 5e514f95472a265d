"""One thread, one seed: every test sees the same numbers wherever it runs. Ranks, a browser."""

import shutil

import pytest
import torch

import modenorm
from modenorm.kernels.c import mode_group_norm as c_mode_group_norm
from modenorm.kernels.c import mode_norm as c_mode_norm
from modenorm.kernels.cpp import module as cpp_module
from modenorm.kernels.cpp import node as cpp_node
from world import SIZE, World

torch.set_num_threads(1)
cpp_module.autograd_nodes()  # waits for them, so that every test sees the same ones


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["eager", "fused"])
def backend(request):
    with modenorm.use_backend(request.param):
        yield request.param


@pytest.fixture
def use_python_nodes(monkeypatch):
    """Call it, and nodes of Python put norms into the graph of autograd from then on."""

    def use():
        monkeypatch.setattr(cpp_node, "make", lambda *args, **kwargs: None)
        c_mode_norm._plans.clear()
        c_mode_group_norm._nodes.clear()

    return use


@pytest.fixture(params=["Python", "C++"])
def nodes(request, use_python_nodes):
    """What puts a norm into the graph of autograd."""
    if request.param == "Python":
        use_python_nodes()
    elif not cpp_module.autograd_nodes().startswith("C++"):
        pytest.skip(cpp_module.autograd_nodes())
    return request.param


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Three ranks."""
    world = World(SIZE, str(tmp_path_factory.mktemp("world") / "store"))
    yield world
    world.close()


@pytest.fixture
def process_group(tmp_path):
    """One rank, this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


QUIET = (
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    """A Chromium that is installed (make browser), by the package playwright."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("no chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield launched
        launched.close()
