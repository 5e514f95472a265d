"""Evaluation of ModeNorm2d, K=2: one launch (some tiles) beside several launches and three passes.

    PYTHONPATH=src python carry/evals.py            (EVALS_DRY=1 TRITON_INTERPRET=1: no GPU)

Columns: three passes in µs; as multiples of that the old path and the new one per variant; the
best; '*' where the present rule takes one launch. Processes compile first, in parallel.
"""

import os
import subprocess
import sys
import time

BEGAN = time.perf_counter()
DRY = os.environ.get("EVALS_DRY") == "1"
WORKERS = 0 if DRY else 10
LIMIT = 37.0

import torch  # noqa: E402

import modenorm  # noqa: E402
from modenorm.kernels import mode_plan, tiles  # noqa: E402
from modenorm.kernels.plan import geometry_of  # noqa: E402
from modenorm.lab.bench.timing import device_time  # noqa: E402

RULE = tiles.one_launch
DEVICE = "cpu" if DRY else "cuda"
# INFERENCE_WARPS, INFERENCE_BYTES
VARIANTS = {
    "32w64B": (32, 64),
    "32w32B": (32, 32),
    "16w64B": (16, 64),
    "16w128B": (16, 128),
}
SHAPES = [(128, 6, 28), (128, 16, 32), (128, 64, 32), (256, 2048, 7), (256, 1024, 14),
          (256, 64, 56), (256, 512, 28)]  # fmt: skip
# for the rule: numbers of samples, and more modes
EXTRA = [((n, 64, 32), 2) for n in (8, 32, 64, 96, 140, 180, 512)]
EXTRA += [((n, 16, 32), 2) for n in (1, 8, 32, 512)]
EXTRA += [((256, 2048, 7), 8), ((128, 16, 32), 8)]
LARGEST = 1 << 20
if DRY:
    SHAPES, EXTRA = [(2, 6, 5), (2, 40, 7)], [((3, 6, 4), 5)]
    VARIANTS = dict(list(VARIANTS.items())[:2])


def cases():
    """Shape, K, type, layout, variants."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            if shape[1] * shape[2] ** 2 * dtype.itemsize <= LARGEST:
                for last in (False, True):
                    yield shape, 2, dtype, last, list(VARIANTS)
    for shape, k in EXTRA:
        for last in (False, True):
            yield shape, k, torch.bfloat16, last, list(VARIANTS)[:1]


def layer_and_input(shape, k, dtype, last):
    n, c, side = shape
    torch.manual_seed(0)
    layer = modenorm.ModeNorm2d(c, k).to(DEVICE).eval()
    for p in layer.parameters():
        torch.nn.init.normal_(p, mean=0.2, std=0.5)
    torch.nn.init.normal_(layer.gate.weight, std=c**-0.5)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    order = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(n, c, side, side, device=DEVICE, dtype=dtype).to(memory_format=order)
    return layer, x


def force(new, variant=None):
    mode_plan.one_launch = (lambda g, k: True) if new else (lambda g, k: False)
    if variant:
        tiles.INFERENCE_WARPS, tiles.INFERENCE_BYTES = VARIANTS[variant]
    mode_plan._plans.clear()


@torch.no_grad()
def outputs(layer, x):
    heard = []
    layer.gate_listener = heard.append
    y = layer(x)
    layer.gate_listener = None
    return y, heard[0]


def warm(index):
    """Compile a share of all kernels into Triton's cache."""
    todo = [(case[:4], v) for case in cases() for v in (None, *case[4])]
    seen = {}
    for case, variant in todo[index::WORKERS]:
        try:
            if case not in seen:
                seen.clear()
                seen[case] = layer_and_input(*case)
            force(variant is not None, variant)
            outputs(*seen[case])
        except Exception:  # the main process will say it
            pass


def same(found, wanted, dtype):
    allowed = 1e-5 if dtype == torch.float32 else 8e-3
    y, gates = found
    error = ((y.double() - wanted[0].double()).norm() / wanted[0].double().norm()).item()
    apart = (gates - wanted[1]).abs().max().item()
    return "" if error < allowed and apart < 1e-4 else f"WRONG y {error:.1e} gates {apart:.1e}"


@torch.no_grad()
def measure(shape, k, dtype, last, variants):
    layer, x = layer_and_input(shape, k, dtype, last)
    wanted = (force(False), outputs(layer, x))[1]
    other = torch.empty_like(x)
    passes = 1.5 * device_time(lambda: other.copy_(x), 0.02)
    old = device_time(lambda: layer(x), 0.02) / passes
    cells, times = [], {}
    for variant in variants:
        try:
            force(True, variant)
            found = outputs(layer, x)
            wrong = same(found, wanted, dtype)
            again = outputs(layer, x)
            if not wrong and not torch.equal(found[0], again[0]):
                wrong = "NOT REPEATED"
            if not wrong:
                times[variant] = device_time(lambda: layer(x), 0.02) / passes
            cells.append(wrong or f"{times[variant]:.2f}")
        except Exception as error:
            cells.append(f"{type(error).__name__}: {str(error)[:60]!r}")
    best = min(times, key=times.get) if times else "none"
    mark = "*" if RULE(geometry_of(x), k) else " "
    size = x[0].numel() * x.element_size() >> 10
    name = f"{shape[0]}x{shape[1]}x{shape[2]}² {'NHWC' if last else 'NCHW'} {str(dtype)[6:]}"
    print(f"{name:26} K{k} {size:4}K{mark} 3p {passes:6.1f} old {old:.2f} new "
          f"{' '.join(cells)}  best {best} {times.get(best, 0):.2f}", flush=True)  # fmt: skip


def main():
    print("variants (warps, bytes):", *VARIANTS, flush=True)
    workers = [
        subprocess.Popen([sys.executable, __file__, "warm", str(i)], stderr=subprocess.DEVNULL)
        for i in range(WORKERS)
    ]
    for worker in workers:
        try:
            worker.wait(max(0.1, BEGAN + 22 - time.perf_counter()))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"compiled after {time.perf_counter() - BEGAN:.0f} s", flush=True)
    for case in cases():
        if time.perf_counter() - BEGAN > LIMIT:
            print("out of time", flush=True)
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
