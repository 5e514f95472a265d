"""Training of ModeNorm2d: moments and gates in one launch (some tiles) beside two launches.

    PYTHONPATH=src python trials/gated.py           (GATED_DRY=1 TRITON_INTERPRET=1: no GPU)

Columns: µs of forward / forward and backward with two launches; for each tile (channels, positions,
warps) by how much that changes, in µs. '*' is the tile of the present rule. Values are checked
first, and that they repeat. Processes compile first, in parallel; graphs are replayed in turns.
"""

import os
import statistics
import subprocess
import sys
import time

BEGAN = time.perf_counter()
DRY = os.environ.get("GATED_DRY") == "1"
WORKERS = 0 if DRY else 13
COMPILED, LIMIT = 17.0, 27.0

import torch  # noqa: E402

import modenorm  # noqa: E402
from modenorm.kernels import gpu_gated_moments, mode_plan  # noqa: E402
from modenorm.kernels.plan import geometry_of  # noqa: E402
from modenorm.kernels.tiles import Tile, gated_tile  # noqa: E402
from modenorm.lab.bench import timing  # noqa: E402

DEVICE = "cpu" if DRY else "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
# shape, K, type, channels last, other tiles than the rule's
CASES = [
    ((128, 6, 28), 2, FP32, False, [(8, 1024, 4), (8, 1024, 16)]),
    ((128, 6, 28), 2, FP32, True, []),
    ((128, 6, 28), 2, BF16, False, [(8, 1024, 4)]),
    ((128, 6, 28), 2, BF16, True, []),
    ((128, 16, 32), 2, FP32, False, [(16, 1024, 8), (16, 1024, 32)]),
    ((128, 16, 32), 2, FP32, True, [(16, 512, 8)]),
    ((128, 16, 32), 2, BF16, False, [(16, 1024, 8)]),
    ((128, 16, 32), 2, BF16, True, [(16, 512, 8)]),
    ((128, 64, 32), 2, FP32, False, [(64, 128, 8), (64, 256, 16)]),
    ((128, 64, 32), 2, FP32, True, [(64, 256, 16)]),
    ((128, 64, 32), 2, BF16, False, [(64, 256, 8), (64, 256, 16)]),
    ((128, 64, 32), 2, BF16, True, [(64, 256, 16)]),
    ((256, 64, 56), 2, FP32, False, [(64, 128, 8)]),
    ((256, 64, 56), 2, FP32, True, [(64, 128, 4)]),
    ((256, 64, 56), 2, BF16, False, [(64, 256, 8)]),
    ((256, 64, 56), 2, BF16, True, [(64, 256, 8)]),
    # for the rule: more modes, small maps, more channels, many samples
    ((128, 6, 28), 8, FP32, False, []),
    ((128, 16, 32), 8, BF16, True, []),
    ((128, 32, 16), 2, BF16, True, []),
    ((128, 64, 8), 2, BF16, True, []),
    ((128, 64, 8), 2, BF16, False, []),
    ((128, 128, 32), 2, BF16, True, []),
    ((256, 256, 8), 2, BF16, True, []),
    ((8, 16, 32), 2, FP32, False, []),
    ((1024, 6, 28), 2, FP32, True, []),
    ((1024, 16, 32), 2, BF16, False, [(16, 1024, 16)]),
]
if DRY:
    CASES = [((2, 6, 5), 2, FP32, False, [(8, 4, 1)]), ((3, 6, 5), 5, BF16, True, [(8, 8, 1)])]


def layer_and_input(shape, k, dtype, last):
    n, c, side = shape
    torch.manual_seed(0)
    layer = modenorm.ModeNorm2d(c, k).to(DEVICE)
    for p in layer.parameters():
        torch.nn.init.normal_(p, mean=0.2, std=0.5)
    torch.nn.init.normal_(layer.gate.weight, std=1.0)
    order = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(n, c, side, side, device=DEVICE, dtype=dtype) + 0.5
    x = x.to(memory_format=order).requires_grad_()
    return layer, x, torch.randn_like(x)


def force(tile):
    gpu_gated_moments.gated_tile = lambda *_: tile
    mode_plan._plans.clear()


def tiles_of(x, k, others):
    rule = gated_tile(geometry_of(x), k)
    return rule, [*([rule] if rule else []), *(Tile(*t) for t in others if Tile(*t) != rule)]


def train(layer, x, dy):
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def outputs(layer, x, dy):
    """Y, gates, gradients, and the running estimates, which are put back."""
    heard, before = [], [b.clone() for b in layer.buffers()]
    layer.gate_listener = heard.append
    found = train(layer, x, dy)
    layer.gate_listener = None
    found += [heard[0].detach(), *(b.clone() for b in layer.buffers())]
    for buffer, old in zip(layer.buffers(), before, strict=True):
        buffer.copy_(old)
    return found


def warm(index):
    """Compile a share of all kernels into Triton's cache."""
    for *case, others in CASES[index::WORKERS]:
        try:
            layer, x, dy = layer_and_input(*case)
            force(None)
            outputs(layer, x, dy)
        except Exception:  # the main process will say it
            continue
        for tile in tiles_of(x, case[1], others)[1]:
            try:
                force(tile)
                layer(x)
            except Exception:
                pass


def wrong(found, wanted, again, dtype):
    """What is wrong with the values, if anything; the first two are in the type of x."""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        allowed = 8e-3 if dtype == BF16 and i < 2 else 5e-4
        error = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)).item()
        if not error < allowed:
            return f"WRONG #{i} {error:.1e}"
    return "" if all(map(torch.equal, found, again)) else "NOT REPEATED"


def times_of(tiles, step, seconds=0.03):
    """Microseconds of a step with each of the tiles, replayed in turns: medians over the turns."""
    graphs = []
    for tile in tiles:
        force(tile)
        step()
        graphs.append(timing.wall_time(step, 0.01) if DRY else timing._capture(step))
    if DRY:
        return graphs
    once = [timing._events(graph, 3) for graph in graphs]
    replays = max(3, min(100, int(seconds * 1e6 / 9 / max(once))))
    turns = [[timing._events(graph, replays) for graph in graphs] for _ in range(9)]
    return [statistics.median(turn) for turn in zip(*turns, strict=True)]


def measure(shape, k, dtype, last, others):
    layer, x, dy = layer_and_input(shape, k, dtype, last)
    rule, tiles = tiles_of(x, k, others)
    force(None)
    wanted = outputs(layer, x, dy)
    cells, good = [], []
    for tile in tiles:
        try:
            force(tile)
            said = wrong(outputs(layer, x, dy), wanted, outputs(layer, x, dy), dtype)
        except Exception as error:
            said = f"{type(error).__name__} {str(error)[:60]!r}"
        if said:
            cells.append(f"{'x'.join(map(str, tile))} {said}")
        else:
            good.append(tile)
    forward = times_of([None, *good], lambda: layer(x))
    both = times_of([None, *good], lambda: train(layer, x, dy))
    for tile, f, b in zip(good, forward[1:], both[1:], strict=True):
        mark = "*" if tile == rule else ""
        label = "x".join(map(str, tile))
        cells.append(f"{mark}{label} {f - forward[0]:+.2f}/{b - both[0]:+.2f}")
    name = f"{shape[0]}x{shape[1]}x{shape[2]}² {'NHWC' if last else 'NCHW'} {str(dtype)[6:]}"
    print(f"{name:27} K{k} {forward[0]:6.2f}/{both[0]:6.2f}  {'  '.join(cells)}", flush=True)


def main():
    workers = [
        subprocess.Popen([sys.executable, __file__, "warm", str(i)], stderr=subprocess.DEVNULL)
        for i in range(WORKERS)
    ]
    for worker in workers:
        try:
            worker.wait(max(0.1, BEGAN + COMPILED - time.perf_counter()))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"compiled after {time.perf_counter() - BEGAN:.0f} s", flush=True)
    for case in CASES:
        if time.perf_counter() - BEGAN > LIMIT:
            print("out of time at", case[:4], flush=True)
            break
        try:
            measure(*case)
        except Exception as error:
            print(case[:4], type(error).__name__, str(error)[:200], flush=True)
    print(f"done after {time.perf_counter() - BEGAN:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["warm"]:
        warm(int(sys.argv[2]))
    else:
        main()
