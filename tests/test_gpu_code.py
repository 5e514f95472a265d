"""Every kernel compiles for GPUs that the tests need not have: the interpreter takes more."""

import re
import subprocess

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from modenorm.kernels.layout import interpreting  # noqa: E402

if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from modenorm.kernels.gpu import entropy as gpu_entropy  # noqa: E402
from modenorm.kernels.gpu import launch as launches  # noqa: E402
from modenorm.kernels.gpu import mixing as gpu_mixing  # noqa: E402
from modenorm.kernels.gpu import switches as gpu_switches  # noqa: E402
from modenorm.kernels.gpu.inference import inference_launch  # noqa: E402
from modenorm.kernels.gpu.mixing_launches import MOST_GROUPED, Mixing  # noqa: E402
from modenorm.kernels.gpu.mode_group_mixing import ChannelMixing  # noqa: E402
from modenorm.kernels.gpu.passes import Geometry, Passes  # noqa: E402
from modenorm.kernels.gpu.plan import AffineKind, MixingKind, RunningKind  # noqa: E402
from modenorm.kernels.gpu.several import launch_for  # noqa: E402
from modenorm.kernels.gpu.tiles import inference_tile, lines_for  # noqa: E402
from modenorm.lab.layers import (  # noqa: E402
    avg_pool,
    batch_norm,
    max_pool,
    narrow_launches,
    small_conv,
    stem_conv,
)

STREAMED = ("x_ptr", "y_ptr", "dy_ptr", "dx_ptr")
OTHER_TYPES = {"tracked_ptr": "i64", "random_ptr": "i64", "place_ptr": "u8"}


def compile_for(launch, capability, streamed="bf16", **types):
    """A launch as on a GPU: its kernel with the types and constants of its arguments."""
    parameters, types = launch.kernel.params, OTHER_TYPES | types
    num_pointers = len(parameters) - len(launch.tail)
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(parameters):
        value = launch.tail[i - num_pointers] if i >= num_pointers else None
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif i < num_pointers:
            kind = streamed if parameter.name in STREAMED else "fp32"
            signature[parameter.name] = f"*{types.get(parameter.name, kind)}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1:  # Triton makes a constant of it
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch.options)


def takes_product_from_itself(ptx):
    """Whether a·b − a·b became one instruction, which gives a·b's rounding error and not zero."""
    products = {out: {a, b} for out, a, b in re.findall(r"mul\S*f32\s+(\S+), (\S+), (\S+);", ptx)}
    negative = dict(re.findall(r"neg\.f32\s+(\S+), (\S+);", ptx))
    fused = re.findall(r"fma\S*f32\s+\S+, (\S+), (\S+), (\S+);", ptx)
    return any(products.get(negative.get(c)) == {a, b} for a, b, c in fused)


def resources(compiled, folder):
    """Registers per thread and bytes of memory, by the names that CUDA's tools give them."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED):(\d+)", said)}


SHARED = AffineKind(weight=True, bias=True)
AFFINE = (AffineKind(False, False), SHARED, AffineKind(True, True, per_mode=True))


def all_launches(*owners):
    parts = [part for owner in owners for part in vars(owner).values()]
    several = [launch for part in parts if isinstance(part, dict) for launch in part.values()]
    return [found for found in parts + several if hasattr(found, "tail")]


@pytest.mark.parametrize(("capability", "channels_last"), [(90, False), (90, True), (80, False)])
def test_kernels_compile(capability, channels_last, monkeypatch):
    monkeypatch.setattr(launches, "can_overlap", lambda: capability >= 90)
    geometry = Geometry(8, 24, 36, channels_last, torch.bfloat16)
    owners = [Passes(geometry)]
    if not channels_last:  # the mixing sees (N, C) arrays alone
        kind = MixingKind(1e-5, SHARED, True, 0.1, RunningKind(True, True, True, True), True)
        owners.append(Mixing(8, 24, 36, 3, kind, True))
        owners.append(ChannelMixing(8, 24, 36, 3, 1e-5, True, SHARED, True))
    found = all_launches(*owners)
    assert len(found) == (9 if channels_last else 23)
    for launch in found:
        ptx = compile_for(launch, capability).asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90), launch.kernel.__name__
        assert not takes_product_from_itself(ptx), launch.kernel.__name__


@pytest.mark.parametrize("positions", [1024, 3136])
def test_sums_stay_in_registers(positions, monkeypatch, tmp_path):
    """The largest tiles, 64 numbers for each thread, twice; or nearly."""
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    passes = Passes(Geometry(128, 64, positions, True, torch.bfloat16))
    for launch in (passes.moments, passes.reduce_backward, passes.reduce_cut_backward):
        few = 64 if launch is passes.reduce_cut_backward else 0  # with a scale and a shift
        assert resources(compile_for(launch, 90), tmp_path)["STACK"] <= few, launch.kernel.__name__


@pytest.mark.parametrize("num_modes", [1, 4, 8, 64], ids="K{}".format)
@pytest.mark.parametrize("channels", [64, 1024, 2048])
def test_mixing_stays_in_registers(channels, num_modes, monkeypatch, tmp_path):
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    running = RunningKind(updates=True, counts_batches=True)
    kind = MixingKind(1e-5, SHARED, True, 0.1, running, has_usage=True)
    mixing = Mixing(256, channels, 49, num_modes, kind, True)
    for launch in all_launches(mixing):
        assert resources(compile_for(launch, 90), tmp_path)["STACK"] == 0, launch.kernel.__name__


@pytest.mark.parametrize("num_modes", [1, 8], ids="K{}".format)
def test_mixing_reads_before_it_waits(num_modes, monkeypatch):
    """What is older than the launch before, if that is known."""
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    kind = MixingKind(1e-5, SHARED, True, 0.1, RunningKind(updates=True), False)
    chain, parts = (Mixing(256, 1024, 49, num_modes, kind, True, yes) for yes in (True, False))
    for name in ("statistics", "coefficients", "modes_backward", "samples_backward"):
        for mixing in (chain, parts):
            launch = getattr(mixing, name)
            launch = launch[False, False] if isinstance(launch, dict) else launch
            before = compile_for(launch, 90).asm["ptx"].partition("griddepcontrol.wait")[0]
            assert ("ld.global" in before) == (mixing is chain), name
            assert "st.global" not in before, name


@pytest.mark.parametrize("num_modes", [2, 3, 8], ids="K{}".format)
def test_groups_of_modes_compile(num_modes, monkeypatch, tmp_path):
    """For as many samples as they take; nothing is spilled."""
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    running = RunningKind(True, True, True, True)
    for affine in AFFINE:
        kind = MixingKind(1e-5, affine, True, 0.1, running, True)
        mixing = Mixing(MOST_GROUPED, 4096, 49, num_modes, kind, True)
        for launch in (mixing.statistics, mixing.modes_backward):
            done, name = compile_for(launch, 90), launch.kernel.__name__
            assert name.startswith("group_")
            assert not takes_product_from_itself(done.asm["ptx"]), name
            assert resources(done, tmp_path)["STACK"] == 0, name


@pytest.mark.parametrize("num_modes", [1, 2, 8], ids="K{}".format)
@pytest.mark.parametrize(("capability", "channels_last"), [(90, False), (90, True), (80, False)])
def test_evaluation_compiles(capability, channels_last, num_modes, monkeypatch):
    monkeypatch.setattr(launches, "can_overlap", lambda: capability >= 90)
    geometry = Geometry(8, 24, 35, channels_last, torch.bfloat16)
    for affine in AFFINE:
        launch = inference_launch(geometry, num_modes, 1e-5, affine, True)
        ptx = compile_for(launch, capability).asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90)
        assert not takes_product_from_itself(ptx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", [(128, 64, 1024), (256, 1024, 196), (256, 2048, 49)], ids=str)
def test_evaluation_reads_wide(shape, channels_last, dtype, monkeypatch, tmp_path):
    """16 bytes at once, whatever the number of positions; nothing is spilled."""
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    geometry = Geometry(*shape, channels_last, dtype)
    launch = inference_launch(geometry, 2, 1e-5, SHARED, True)
    done = compile_for(launch, 90, "bf16" if dtype.itemsize == 2 else "fp32")
    assert resources(done, tmp_path)["STACK"] == 0
    tile, threads = inference_tile(geometry, 2), 32 * launch.options["num_warps"]
    vectors = tile.rows * tile.positions * dtype.itemsize // 16 // threads
    ptx = done.asm["ptx"]
    assert ptx.count("st.global.v4.b32") == vectors
    assert ptx.count("ld.global.v4.b32") >= 2 * vectors
    if not channels_last:  # threads exchange their last sums alone
        assert done.metadata.shared < 4 * tile.rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flat_maps_read_wide(dtype, monkeypatch, tmp_path):
    """Rows of 49 numbers, 16 bytes at once; nothing is spilled."""
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    passes = Passes(Geometry(256, 2048, 49, False, dtype))
    for launch, tensors in ((passes.apply, 1), (passes.apply_backward[True, True], 2)):
        done = compile_for(launch, 90, "bf16" if dtype.itemsize == 2 else "fp32")
        assert resources(done, tmp_path)["STACK"] == 0
        vectors = 1024 * dtype.itemsize // 16 // (32 * launch.options["num_warps"])
        ptx = done.asm["ptx"]
        assert ptx.count("st.global.v4.b32") == max(1, vectors)
        assert ptx.count("ld.global.v4.b32") == tensors * max(1, vectors)


RAGGED = [(49, torch.bfloat16), (49, torch.float32), (196, torch.bfloat16)]


@pytest.mark.parametrize(("positions", "dtype"), RAGGED, ids=str)
def test_sums_over_ragged_rows_read_wide(positions, dtype, monkeypatch, tmp_path):
    """16 bytes at once; Triton 3.9 spills two numbers in a case."""
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    geometry = Geometry(256, 2048, positions, False, dtype)
    passes, lines = Passes(geometry), lines_for(geometry)
    for launch, tensors in ((passes.moments, 1), (passes.mean, 1), (passes.reduce_backward, 2)):
        done = compile_for(launch, 90, "bf16" if dtype.itemsize == 2 else "fp32")
        assert resources(done, tmp_path)["STACK"] <= 8
        assert (
            done.asm["ptx"].count("ld.global.v4.b32") == tensors * lines.pieces * lines.lines // 32
        )
        assert done.metadata.shared <= 4 * lines.lines  # the rows' sums alone


@pytest.mark.parametrize("affine", AFFINE, ids=str)
def test_parts_of_the_mixing_compile(affine, monkeypatch):
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    parts = gpu_mixing._launches.__wrapped__((8, 24, 3), 1e-5, affine, 0, True)
    for launch in all_launches(parts):
        assert "griddepcontrol.wait" in compile_for(launch, 90).asm["ptx"], launch.kernel.__name__


@pytest.mark.parametrize(("layers", "modes"), [(1, 2), (2, 8), (8, 64), (1, 424)])
def test_entropies_compile(layers, modes, monkeypatch):
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    sizes = (layers, modes, modes, 1e-30)
    launch = launch_for.__wrapped__(gpu_entropy._entropies_kernel, sizes, (), 0, True)
    done = compile_for(launch, 90)
    assert "griddepcontrol.wait" in done.asm["ptx"]


@pytest.mark.parametrize(("layers", "modes"), [(1, 2), (2, 8), (8, 64), (1, 424)])
def test_switches_compile(layers, modes, monkeypatch):
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    draw, back = gpu_switches._draw_kernel, gpu_switches._draw_backward_kernel
    for kernel, sizes, constants in (
        (draw, (layers, modes, modes, layers * modes, 2 / 3, -0.1, 1.1, 1e-6, -1.6), (True,)),
        (back, (layers, modes, layers * modes), (True,)),
    ):
        launch = launch_for.__wrapped__(kernel, sizes, constants, 0, True)
        assert "griddepcontrol.wait" in compile_for(launch, 90).asm["ptx"]


@pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])
@pytest.mark.parametrize(("capability", "samples"), [(90, 128), (90, 256), (80, 128)])
def test_batch_norms_compile(capability, samples, relu, monkeypatch, tmp_path):
    """Between the passes; nothing is spilled."""
    monkeypatch.setattr(launches, "can_overlap", lambda: capability >= 90)
    geometry = Geometry(samples, 192, 64, True, torch.bfloat16)
    plan = batch_norm.Plan(geometry, 1e-5, 0.1, relu, True)
    for launch in (plan.statistics, plan.gradients):
        done = compile_for(launch, capability)
        ptx, name = done.asm["ptx"], launch.kernel.__name__
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90), name
        assert not takes_product_from_itself(ptx), name
        assert resources(done, tmp_path)["STACK"] == 0, name


NARROW = [(1, 16, 16, 32), (1, 32, 32, 16), (1, 64, 64, 8)]
STRIDED = [(2, 16, 32, 32), (2, 32, 64, 16), (2, 64, 64, 17)]


@pytest.mark.parametrize(
    ("capability", "stride", "c_in", "c_out", "side"),
    [*((90, *sizes) for sizes in NARROW + STRIDED), (80, *NARROW[-1]), (80, *STRIDED[-1])],
)
def test_narrow_convolutions_compile(capability, stride, c_in, c_out, side, monkeypatch, tmp_path):
    """Matrix instructions, asynchronous copies, no more shared memory than an sm_80 has."""
    monkeypatch.setattr(launches, "can_overlap", lambda: capability >= 90)
    plan = [(128, c_in, side, side), (c_out, c_in, 3, 3), (9 * c_in, 1, 3 * c_in, c_in)]
    if stride == 1:
        convs = [narrow_launches.conv_launch(*plan, flip) for flip in (False, True)]
        wgrad, add_up, _ = narrow_launches.wgrad_launches(*plan)
    else:
        kinds = narrow_launches.strided_conv_launch, narrow_launches.strided_input_launch
        convs = [kind(*plan) for kind in kinds]
        wgrad, add_up, _ = narrow_launches.strided_wgrad_launches(*plan)
    for launch in (*convs, wgrad, add_up):
        done = compile_for(launch, capability)
        ptx = done.asm["ptx"]
        name = launch.kernel.__name__
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90), name
        assert done.metadata.shared <= 163 * 1024, name
        if launch is not add_up:
            assert "mma" in ptx, name
            assert "cp.async" in ptx, name
        if stride == 2 and capability == 90:
            assert resources(done, tmp_path)["STACK"] == 0, name


@pytest.mark.parametrize(
    ("capability", "channels", "side"), [(90, 96, 32), (90, 64, 33), (80, 96, 32)]
)
def test_pooling_compiles(capability, channels, side, monkeypatch, tmp_path):
    """Eight channels per load and store, in registers of which six programs find enough."""
    monkeypatch.setattr(launches, "can_overlap", lambda: capability >= 90)
    shape = (128, channels, side, side)
    for make in (max_pool.pool_launch, max_pool.unpool_launch, avg_pool.spread_launch):
        launch = make(shape)
        done = compile_for(launch, capability)
        ptx = done.asm["ptx"]
        name = launch.kernel.__name__
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90), name
        widths = set(re.findall(r"(?:ld|st)\.global\.(\S+)", ptx))
        assert widths == {"v4.b32", "v2.b32"} - ({"v2.b32"} if "spread" in name else set()), name
        used = resources(done, tmp_path)
        assert used["STACK"] == used["SHARED"] == 0, name
        assert used["REG"] * 6 * 32 * launch.options["num_warps"] <= 1 << 16, name


LENETS = [((3, 6), 32, 1, 0), ((6, 16), 14, 1, 0), ((3, 12), 32, 2, 2), ((12, 12), 16, 2, 2)]


@pytest.mark.parametrize(
    ("capability", "channels", "side", "stride", "padding"),
    [*((90, *sizes) for sizes in LENETS), (80, *LENETS[-1])],
)
def test_small_convolutions_compile(
    capability, channels, side, stride, padding, monkeypatch, tmp_path
):
    """Products of float32, in registers of which 12 warps find enough; threads share nothing."""
    monkeypatch.setattr(launches, "can_overlap", lambda: capability >= 90)
    after = (side + 2 * padding - 5) // stride + 1
    shape, result = (512, channels[0], side, side), (512, channels[1], after, after)
    steps = ((5, 5), stride, padding)
    convs = [
        small_conv.conv_launch(shape, result, *steps, False),
        small_conv.conv_launch(result, shape, *steps, True),
    ]
    wgrad, add_up, _ = small_conv.wgrad_launches(shape, result, *steps)
    for launch in (*convs, wgrad, add_up):
        done = compile_for(launch, capability, "fp32")
        ptx = done.asm["ptx"]
        name = launch.kernel.__name__
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90), name
        assert "mma" not in ptx, name
        if launch is add_up:
            continue
        assert "fma.rn.f32" in ptx, name
        used = resources(done, tmp_path)
        assert used["STACK"] == used["SHARED"] == 0, name
        assert used["REG"] * 12 * 32 <= 1 << 16, name


STEMS = [(192, 5, 1, 32), (64, 7, 2, 64), (16, 3, 1, 32), (64, 3, 1, 32)]


@pytest.mark.parametrize("images", ["fp32", "bf16"])
@pytest.mark.parametrize(("channels", "taps", "stride", "side"), STEMS)
def test_first_convolutions_compile(channels, taps, stride, side, images, monkeypatch, tmp_path):
    """One load for each number of a window, matrix instructions, hardly anything spilled."""
    monkeypatch.setattr(launches, "can_overlap", lambda: True)
    plan = [(128, 3, side, side), (channels, 3, taps, taps)]
    plan += [(3 * taps**2, 1, 3 * taps, 3), stride, taps // 2]
    wgrad, add_up, _ = stem_conv.wgrad_launches(*plan)
    for launch in (stem_conv.conv_launch(*plan), wgrad, add_up):
        done = compile_for(launch, 90, x_ptr=images)
        ptx, name = done.asm["ptx"], launch.kernel.__name__
        assert "griddepcontrol.wait" in ptx, name
        # tiles of the weights' gradient that spill nothing were measured to be slower
        assert resources(done, tmp_path)["STACK"] <= (128 if launch is wgrad else 0), name
        if launch is wgrad:
            scalar = re.findall(rf"ld\.global\.b{32 if images == 'fp32' else 16} ", ptx)
            # ptxas drops what no mask lets through
            assert len(scalar) == -(-3 * taps**2 // 16) * 16
            assert "mma" in ptx


def test_first_convolutions_compile_for_others(monkeypatch):
    monkeypatch.setattr(launches, "can_overlap", lambda: False)
    plan = [(128, 3, 32, 32), (64, 3, 3, 3), (27, 9, 3, 1), 1, 1]
    for launch in (stem_conv.conv_launch(*plan), *stem_conv.wgrad_launches(*plan)[:2]):
        done = compile_for(launch, 80, x_ptr="fp32")
        assert "griddepcontrol.wait" not in done.asm["ptx"]
        assert done.metadata.shared <= 163 * 1024
