"""Times every method of convolving for many clients over a grid of shapes: the figures behind `convolution.rule`.

python benchmarks/convolutions.py [--device cuda] [--threads 1] > convolutions.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import torch

from offbeat.numerics.fast import convolution
from offbeat.numerics.fast.places import Places

CLIENTS = {"cpu": 5, "cuda": 48}
SIDES = [  # channels, side, filters, kernel, stride, padding
    (1, 28, 32, 5, 1, 0), (1, 28, 10, 5, 1, 0), (32, 12, 64, 5, 1, 0), (10, 12, 20, 5, 1, 0),
    (3, 32, 32, 5, 1, 0), (32, 14, 64, 5, 1, 0), (3, 32, 64, 5, 1, 2), (3, 32, 6, 5, 1, 0), (6, 14, 16, 5, 1, 0),
    (3, 32, 16, 3, 1, 1), (16, 32, 16, 3, 1, 1), (16, 32, 32, 3, 2, 1), (32, 16, 32, 3, 1, 1), (64, 8, 64, 3, 1, 1),
    (128, 4, 128, 3, 1, 1), (64, 16, 128, 3, 1, 1), (64, 32, 64, 3, 1, 1), (256, 4, 256, 3, 1, 1),
    (512, 2, 512, 3, 1, 1), (64, 8, 192, 3, 1, 1), (16, 32, 32, 1, 2, 0), (64, 16, 64, 1, 1, 0), (256, 4, 512, 1, 1, 0),
    (4, 8, 8, 3, 1, 1), (1, 8, 8, 3, 1, 0),
]  # fmt: skip


def work_of(name: str, n: int, batch: int, sides: tuple[int, ...], dtype: torch.dtype, device: Any, slope: bool) -> Any:
    c, side, f, k, stride, pad = sides
    x = torch.randn((n, batch, c, side, side), dtype=dtype, device=device, requires_grad=slope)
    size = f * c * k * k
    rows = torch.randn((2, n, size + f), dtype=dtype, device=device)
    at, to = ((row[:, :size].reshape(n, f, c, k, k), row[:, size:]) for row in rows)
    weights, shifts = (t.detach().requires_grad_() for t in at)
    method = convolution.METHODS[name]
    asked = [x, weights, shifts] if slope else [weights, shifts]

    def work() -> None:
        places = Places((weights, shifts), to)
        with torch.enable_grad():
            out = method(x, weights, shifts, (stride, stride), (pad, pad), places)
            gradients = torch.autograd.grad(out, asked, torch.ones_like(out), allow_unused=True)
        places.fill(gradients[-2:])

    return work


def seconds(work: Any, device: str) -> float:
    now = time.perf_counter if device == "cuda" else time.process_time  # other programs may be busy
    if device == "cuda":
        work()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            work()
        run, repeats = graph.replay, 5
    else:
        run, repeats = work, 12
    times = []
    for _ in range(repeats + 1):
        began = now()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(now() - began)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="*", default=[10, 20, 50])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kinds = ["float32", "float64"] if given.device == "cpu" else ["tf32", "float32", "float64"]
    rows = []
    for kind, batch, sides, slope in itertools.product(kinds, given.batches, SIDES, (True, False)):
        if slope and sides[0] in (1, 3) and sides[1] >= 28:
            continue  # first layers
        if not slope and not (sides[0] in (1, 3) and sides[1] >= 28):
            continue
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = kind == "tf32"
        dtype = torch.float64 if kind == "float64" else torch.float32
        taken = {}
        for name in ["each", "product"] if given.device == "cpu" else ["fused", "product"]:
            try:
                work = work_of(name, CLIENTS[given.device], batch, sides, dtype, given.device, slope)
                taken[name] = seconds(work, given.device) * 1e6
            except Exception as error:
                taken[name] = str(error)[:80]
        rows.append({"kind": kind, "batch": batch, "sides": sides, "slope": slope, "us": taken})
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
