"""Launches in one call of C: the driver that gets them here runs Triton's interpreter."""

import copy
import ctypes
import inspect
import itertools
import types

import pytest
import torch

pytest.importorskip("triton")

from test_fused import layer_for, tensor

import modenorm
from modenorm.convert.substitutes import ModeNormAct2d
from modenorm.kernels import choice
from modenorm.kernels.c.library import library
from modenorm.kernels.cpp import node as cpp_node
from modenorm.kernels.cpp import operator as cpp_operator
from modenorm.kernels.cpp.module import cpp_module
from modenorm.kernels.gpu import (
    launch,
    mode_group_norm_plan,
    mode_norm_operator,
    mode_norm_plan,
    stage,
    tiles,
)
from modenorm.kernels.gpu import mode_group_norm as gpu_mode_group_norm
from modenorm.kernels.gpu import mode_norm as gpu_mode_norm
from modenorm.kernels.layout import interpreting

if not interpreting():
    pytest.skip("a stand-in for the driver needs the interpreter", allow_module_level=True)
if library().library is None:
    pytest.skip("there is no C compiler", allow_module_level=True)

U32, U64, ADDRESS = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
NUMBERS = itertools.count(1000, 1000)
"""Of operators, for each stand-in: C++ never forgets a call."""


PARAMETERS = {
    "*fp32": ".param .u64 .ptr .global .align 1 p",
    "i32": ".param .u32 p",
    "i64": ".param .u64 p",
    "fp32": ".param .f32 p",
}
"""How a kernel's code declares what it takes, by its kind."""
PLAIN = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "num_ctas": 1,
}
"""What Triton says of kernels without extras."""


class Attribute(ctypes.Structure):
    _fields_ = (("id", U32), ("padding", U32), ("on", ctypes.c_int32), ("rest", U32 * 15))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", U32 * 3),
        ("block", U32 * 3),
        ("shared", U32),
        ("stream", ADDRESS),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", U32),
    )


class StandIn:
    """Looks like the CUDA driver, and runs the kernels it is given in the interpreter."""

    def __init__(self, monkeypatch, nodes):
        self.kernels, self.arrays, self.log, self.error = {}, (), [], 0
        self.in_cpp = False  # whose other arrays are all of float32
        self.repeated = 0
        self.said, self.more = PLAIN, ["*fp32", "*fp32"]  # of a kernel; arguments after its own
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Config), ADDRESS, ctypes.POINTER(ADDRESS), ADDRESS
        )
        self.function = kind(self.run)
        address = ctypes.cast(self.function, ADDRESS).value
        monkeypatch.setattr(stage, "_driver", lambda: address)
        monkeypatch.setattr(stage, "interpreting", lambda: False)
        monkeypatch.setattr(stage, "current_stream", lambda x: 7)
        for module in (gpu_mode_norm, gpu_mode_group_norm, cpp_operator):
            monkeypatch.setattr(module, "current_stream", lambda x: 7)
        one_by_one, all_at_once = launch.Launch.__call__, stage.Stage.__call__
        make = cpp_node.make

        def compile_first(this, stream, *pointers):
            one_by_one(this, stream, *pointers)
            this.compiled = this.compiled or self.compiled(this, pointers)

        def remember(this, arrays):
            self.see(arrays, in_cpp=False)
            all_at_once(this, arrays)

        def make_listening(*args, **kwargs):
            node = make(*args, **kwargs)

            def listening(stream, *arrays):
                self.see(arrays, in_cpp=True)
                return node(stream, *arrays)

            return node and listening

        first = next(NUMBERS)

        def repeat(stream, number, *arguments):
            self.see([a for a in arguments if isinstance(a, torch.Tensor)], in_cpp=True)
            found = cpp_module().repeat(stream, first + number, *arguments)
            self.repeated += found is not None
            return found

        def keep(task, shapes, owner, number, *arguments):
            cpp_module().remember(task, shapes, owner, first + number, *arguments)

        listening_module = types.SimpleNamespace(repeat=repeat, remember=keep)
        known = listening_module if nodes == "C++" else None
        monkeypatch.setattr(cpp_operator, "cpp_module", lambda: known)
        monkeypatch.setattr(cpp_node, "make", make_listening)
        monkeypatch.setattr(launch.Launch, "__call__", compile_first)
        monkeypatch.setattr(stage.Stage, "__call__", remember)

    def see(self, arrays, in_cpp):
        self.arrays, self.in_cpp = [array for array in arrays if array is not None], in_cpp

    def compiled(self, this, pointers):
        """What Triton would return: ints of 1 are constants to it, as `tl.constexpr` are."""
        names = list(inspect.signature(this.kernel.fn).parameters)[len(pointers) :]
        kinds = ["*fp32"] * len(pointers)
        for name, value in zip(names, this.tail, strict=True):
            number = "fp32" if isinstance(value, float) else "i32"
            kinds.append("constexpr" if name.isupper() or value == 1 else number)
        function = 1000 + len(self.kernels)
        self.kernels[function] = this, kinds
        metadata = types.SimpleNamespace(
            num_warps=this.options["num_warps"],
            shared=48,
            launch_pdl=len(self.kernels) % 2,
            **self.said,
        )
        taken = [kind for kind in kinds if kind != "constexpr"] + self.more
        head = f".visible .entry kernel({', '.join(PARAMETERS[kind] for kind in taken)}) {{"
        source = types.SimpleNamespace(signature=dict(enumerate(kinds)))
        return types.SimpleNamespace(
            function=function, metadata=metadata, src=source, asm={"ptx": head}
        )

    def run(self, config, function, arguments, extra):
        config = config.contents
        this, kinds = self.kernels[function]
        assert tuple(config.grid) == this.grid
        assert tuple(config.block) == (32 * this.options["num_warps"], 1, 1)
        assert (config.shared, config.stream, extra) == (48, 7, None)
        assert config.count == this.compiled.metadata.launch_pdl
        assert (config.attributes[0].id, config.attributes[0].on) == (6, 1)
        passed = iter(range(len(kinds)))
        if self.error:
            return self.error
        given = [
            this.tail[i - len(kinds)]
            if kind == "constexpr"
            else self.read(arguments[next(passed)], kind)
            for i, kind in enumerate(kinds)
        ]
        place = next(passed)
        assert [self.read(arguments[place + i], "i64") for i in range(2)] == [0, 0]
        this.kernel[this.grid](*given)
        self.log.append(this.kernel.__name__)
        return 0

    def read(self, address, kind):
        types_ = {"fp32": ctypes.c_float, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
        if kind in types_:
            return types_[kind].from_address(address).value
        target = U64.from_address(address).value
        if target == 0:  # of an array without elements
            return torch.empty(1)
        for array in self.arrays:
            start = target - array.data_ptr()
            if 0 <= start < array.numel() * array.element_size():
                flat = array.as_strided((array.numel(),), (1,))
                return flat[start // array.element_size() :]
        assert self.in_cpp, "an address outside of all arrays"
        return torch.frombuffer((ctypes.c_float * 1).from_address(target), dtype=torch.float32)


@pytest.fixture
def stand_in(monkeypatch, nodes):
    clear = (mode_norm_plan._plans.clear, mode_group_norm_plan._plan.cache_clear)
    for each in clear:
        each()
    yield StandIn(monkeypatch, nodes)
    for each in clear:
        each()


def step(layer, x, dy, penalty=None, **given):
    """Output, gradients and buffers of a training step on a copy of the layer."""
    layer = copy.deepcopy(layer)
    penalty = modenorm.ModeSparsity(layer) if penalty else None
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x, **given)
    loss = (y * dy).sum() + (penalty() if penalty else 0)
    learnt = [p for n, p in layer.named_parameters() if not (given and n.startswith("gate."))]
    return [y, *torch.autograd.grad(loss, [x, *learnt]), *layer.buffers()]


def check(stand_in, wanted, found, kernels):
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)
    assert stand_in.log == kernels


FORWARD = ["moments_kernel", "gates_kernel", "statistics_kernel", "coefficients_kernel"]
FORWARD += ["apply_kernel"]
BACKWARD = ["reduce_backward_kernel", "modes_backward_kernel", "samples_backward_kernel"]
BACKWARD += ["parameters_backward_kernel", "apply_backward_kernel"]


@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"per_mode_affine": True},
        {"momentum": 0.3, "running_update": "usage"},
        {"track_running_stats": False},
        {"penalty": True},
        {"given": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_training_step(stand_in, options, channels_last, nodes):
    torch.manual_seed(0)
    options = dict(options)
    given, penalty = options.pop("given", False), options.pop("penalty", False)
    x = tensor((5, 6, 3, 4), "cpu", torch.float32, channels_last)
    layer, dy = layer_for(x.shape, 3, "cpu", **options), torch.randn_like(x)
    more = {"gates": torch.softmax(torch.randn(5, 3), 1)} if given else {}
    first = step(layer, x, dy, penalty, **more)
    assert stand_in.log == []
    check(stand_in, first, step(layer, x, dy, penalty, **more), FORWARD + BACKWARD)
    assert stand_in.in_cpp == (nodes == "C++" and not given and not penalty)


@pytest.mark.parametrize("largest", [0, tiles.LARGEST_SAMPLE], ids=["passes", "one launch"])
def test_evaluation(stand_in, monkeypatch, largest):
    monkeypatch.setattr(tiles, "LARGEST_SAMPLE", largest)
    launched = ["_inference_kernel"] if largest else FORWARD[:2] + FORWARD[3:]
    layer = layer_for((5, 6, 3, 4), 3, "cpu").eval()
    with torch.no_grad():
        x = torch.randn(5, 6, 3, 4)
        first = layer(x)
        other = torch.randn(5, 6, 3, 4)
        check(stand_in, [first], [layer(x)], launched)
        assert not torch.equal(layer(other), first)  # addresses are those of the call


@pytest.mark.parametrize("variance", ["pooled", "pixel"])
def test_mode_group_norm(stand_in, variance, nodes):
    torch.manual_seed(0)
    layer = modenorm.ModeGroupNorm(6, 3, variance=variance)
    x, dy = torch.randn(5, 6, 3, 4), torch.randn(5, 6, 3, 4)
    first = step(layer, x, dy)
    assert stand_in.log == []
    again = step(layer, x, dy)
    assert len(stand_in.log) == 7
    assert stand_in.in_cpp == (nodes == "C++")
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    heard = []
    layer.gate_listener = heard.append
    assert torch.equal(layer(x), first[0])
    assert torch.allclose(heard[0].sum(-1), torch.ones(5, 6))


LAYERS = {
    "mode": lambda: modenorm.ModeNorm2d(6, 3),
    "without more": lambda: modenorm.ModeNorm2d(6, 3, affine=False, track_running_stats=False),
    "usage": lambda: modenorm.ModeNorm2d(6, 3, running_update="usage", momentum=0.3),
    "relu": lambda: ModeNormAct2d(6, 3, drop=torch.nn.Identity(), act=torch.nn.ReLU()),
    "group": lambda: modenorm.ModeGroupNorm(6, 3),
    "pixel": lambda: modenorm.ModeGroupNorm(6, 3, variance="pixel"),
}


@pytest.fixture
def traced(monkeypatch):
    """Layers as `torch.compile` has them on a GPU, but without Inductor."""
    monkeypatch.setattr(choice, "runs_operators", lambda x: True)
    torch.compiler.reset()
    yield lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.compiler.reset()


@pytest.mark.parametrize("name", LAYERS)
def test_operators(stand_in, traced, name, nodes):
    """C++ repeats what it saw once, for these tensors and for others like them."""
    layer = LAYERS[name]()
    x, dy, other = (torch.randn(5, 6, 3, 4) for _ in range(3))
    first = step(traced(layer), x, dy)
    assert stand_in.repeated == 0
    with_other = step(traced(layer), other, dy)
    assert not torch.equal(with_other[0], first[0])
    for given, wanted in ((x, first), (other, with_other)):
        for a, b in zip(wanted, step(traced(layer), given, dy), strict=True):
            assert torch.equal(a, b)
    assert stand_in.repeated == (6 if nodes == "C++" else 0)
    check_against(layer, x, dy, first)


def check_against(layer, x, dy, found):
    """The same step without `torch.compile`, whose map is rounded otherwise."""
    for a, b in zip(step(layer, x, dy), found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_operators_of_one_tensor_twice(stand_in, nodes):
    """Later ones may be two."""
    x, gate = torch.randn(5, 6, 3, 4), (torch.randn(3, 6), torch.randn(3))
    inputs = (None, *gate, None, None)
    kept, *_ = mode_norm_operator.statistics(x, *inputs, *(None,) * 4, 1e-5, 0.1, False, False)
    for _ in range(2):
        mode_norm_operator.gradients(x, None, None, x, *inputs, kept, None, 1e-5)
    assert stand_in.repeated == 0


def test_operators_on_another_gpu(stand_in, monkeypatch):
    """C++ runs on the current one: what it can't repeat does not fill its memory."""
    remembered = itertools.count()
    monkeypatch.setattr(cpp_operator, "_remembered", remembered)
    monkeypatch.setattr(cpp_operator, "is_elsewhere", lambda x: True)
    given = torch.randn(5, 6, 3, 4), None, torch.randn(3, 6), torch.randn(3), *(None,) * 6
    for _ in range(3):
        mode_norm_operator.statistics(*given, 1e-5, 0.1, False, False)
    assert next(remembered) == stand_in.repeated == 0


@pytest.mark.parametrize(
    "said",
    [
        {"global_scratch_size": 128},
        {"profile_scratch_size": 8},
        {"launch_cooperative_grid": True},
        {"num_ctas": 2},
        None,
    ],
    ids=str,
)
def test_kernels_with_extras_go_one_by_one(stand_in, said):
    """C would not know what to give them; nor where Triton says less than it does now."""
    stand_in.said = {} if said is None else PLAIN | said
    check_one_by_one(stand_in)


@pytest.mark.parametrize("more", [["*fp32"], ["*fp32"] * 3, ["i32", "*fp32"]], ids=str)
def test_kernels_with_other_arguments_go_one_by_one(stand_in, more):
    stand_in.more = more
    check_one_by_one(stand_in)


def check_one_by_one(stand_in):
    layer, x = modenorm.ModeNorm2d(6), torch.randn(5, 6, 3, 4)
    first = step(layer, x, x)
    check(stand_in, first, step(layer, x, x), [])


def test_a_thread_without_context(stand_in, monkeypatch):
    torch.manual_seed(0)
    layer, x = modenorm.ModeNorm2d(6), torch.randn(5, 6, 3, 4)
    dy = torch.randn_like(x)
    entered = []

    def enter():
        entered.append(list(stand_in.log))
        stand_in.error = 0

    monkeypatch.setattr(stage, "_enter_context", enter)
    wanted = step(layer, x, dy)
    stand_in.error = stage.INVALID_CONTEXT
    check(stand_in, wanted, step(layer, x, dy), FORWARD + BACKWARD)
    assert entered == [[]]


def test_an_error_of_the_driver(stand_in):
    layer, x = modenorm.ModeNorm2d(6), torch.randn(5, 6, 3, 4)
    step(layer, x, x)
    stand_in.error = 700
    with pytest.raises(RuntimeError, match="refused to launch a kernel: error 700"):
        layer(x)
