"""Host microseconds of an eager ModeNorm2d call: the GPU path's Python, its launches left out.

Run with TRITON_INTERPRET=1, which sends CPU tensors down the GPU path. The call of C is made, with
no kernel in it. Usage: host.py [--profile] [--parts] [--shape 128,6,28,28]
"""

import argparse
import contextlib
import cProfile
import ctypes
import gc
import os
import pstats
import statistics
import sys
import time

os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
libc = ctypes.CDLL(None)  # memory from the heap, as from CUDA's cache: no mmap for each tensor
libc.mallopt(-3, 1 << 30)
libc.mallopt(-1, 1 << 30)
import modenorm
from modenorm.kernels import launch, mode_plan, stage
from modenorm.kernels.mode_arrays import Backward, Forward, Inference

made = mode_plan.ModePlan.__init__


def nothing(arrays):
    return stage.Sequence(0, [], len(arrays._fields))


def make(self, *args, **kw):
    made(self, *args, **kw)
    self.run_forward.sequence = nothing(Forward)
    self.run_inference.sequence = nothing(Inference)
    for each in self.run_backward:
        each.sequence = nothing(Backward)


mode_plan.ModePlan.__init__ = make


def steps(norm, x, dy):
    parameters = list(norm.parameters())
    wanted = [x, *parameters]
    grad = torch.autograd.grad

    def both(clock=time.perf_counter_ns):
        a = clock()
        y = norm(x)
        b = clock()
        g = grad(y, wanted, dy)
        c = clock()
        return b - a, c - b

    return both


def measure(both, calls=2000):
    for _ in range(200):
        both()
    found = [both() for _ in range(calls)]
    return tuple(statistics.median(t) / 1e3 for t in zip(*found))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shape", default="128,6,28,28")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    shape = tuple(map(int, args.shape.split(",")))
    x = torch.randn(shape, requires_grad=True)
    dy = torch.randn(shape)
    tiny = torch.randn(2, shape[1], 1, 1, requires_grad=True)
    dtiny = torch.randn_like(tiny)
    norms = {
        "MN": steps(modenorm.ModeNorm2d(shape[1]), x, dy),
        "BN": steps(nn.BatchNorm2d(shape[1]), tiny, dtiny),
    }
    gc.collect()
    gc.disable()
    best = {}
    for _ in range(args.rounds):
        for name, both in norms.items():
            f, b = measure(both)
            bf, bb = best.get(name, (1e9, 1e9))
            best[name] = (min(f, bf), min(b, bb))
    for name, (f, b) in best.items():
        print(f"{name}: forward {f:6.1f}  backward {b:6.1f}  both {f + b:6.1f} µs")
    if args.profile:
        profile = cProfile.Profile()
        both = norms["MN"]
        # backward runs in this thread on a CPU
        profile.enable()
        for _ in range(3000):
            both()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


main()
