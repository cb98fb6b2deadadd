"""Convolutions with a kernel of each client's own, by the method that is fastest for the shape, on this device.

`x [n, b, c, h, w]`, `w [n, f, c, kh, kw]` and `bias [n, f]` give `[n, b, f, oh, ow]`. All methods compute the same
sums in another order. Which one is taken is measured at the first convolution of a shape and kept in `chosen`; a
checkpoint carries it, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Pair: TypeAlias = tuple[int, int]
Method: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Pair, Pair, Any], Tensor]

TRIED = {"cpu": 1, "cuda": 48}  # clients in the wave that methods are tried on; tiles of a CPU are small
chosen: dict[str, str] = {}  # shape in words -> name of the method


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """The convolution of n clients by the chosen method; `places` are where it may write its gradients."""
    usable = methods(x.device.type, x.dtype)
    name = signature(x, w, step, padding)
    if chosen.get(name) not in usable:
        chosen[name] = fastest(usable, x, w, step, padding)
    return usable[chosen[name]](x, w, bias, step, padding, places)


def signature(x: Tensor, w: Tensor, step: Pair, padding: Pair) -> str:
    """All that the choice hangs on. The number of clients is not in it: waves of all sizes take the same method."""
    sides = "x".join(map(str, x.shape[1:])) + " * " + "x".join(map(str, w.shape[1:]))
    exact = torch.get_float32_matmul_precision() == "highest"
    kind = "tf32" if x.dtype == torch.float32 and x.is_cuda and not exact else str(x.dtype).removeprefix("torch.")
    slope = "with" if x.requires_grad else "without"
    return f"{x.device.type} {kind} {sides} stride {step} padding {padding} {slope} input gradient"


def fastest(usable: dict[str, Method], x: Tensor, w: Tensor, step: Pair, padding: Pair) -> str:
    """The name of the method that takes least time, forwards, backwards and to put the gradients where they belong, for
    some clients with such shapes."""
    from offbeat.numerics.clients import Places  # which knows this file

    if len(usable) == 1:
        return next(iter(usable))
    n = TRIED[x.device.type]
    taken: dict[str, float] = {}
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        images = torch.ones((n, *x.shape[1:]), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
        rows = torch.ones((2, n, w[0].numel() + w.shape[1]), dtype=w.dtype, device=w.device)  # as they lie in a wave
        at, to = ((row[:, : w[0].numel()].reshape(n, *w.shape[1:]), row[:, w[0].numel() :]) for row in rows)
        weights, shifts = (t.detach().requires_grad_(w.requires_grad) for t in at)
        asked = [t for t in (images, weights, shifts) if t.requires_grad]
        for name, method in usable.items():

            def work(method: Method = method) -> None:
                places = Places((weights, shifts), to)
                out = method(images, weights, shifts, step, padding, places)
                if asked:
                    found = torch.autograd.grad(out, asked, torch.ones_like(out), allow_unused=True)
                    if w.requires_grad:
                        places.fill(found[-2:])

            try:
                taken[name] = seconds(work, x.device)
            except Exception:  # a shape that this method cannot do here; the product can do all
                if name == "product":
                    raise
    return min(taken, key=lambda name: taken[name])


def seconds(work: Callable[[], None], device: torch.device, repeats: int = 3) -> float:
    """The least of some repeats; on a GPU the time of the device alone, as in a replayed graph."""
    times = []
    if device.type == "cuda":
        work()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


# ---- the methods --------------------------------------------------------------------------------
def product(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """Patches as rows of one matrix per client, times its weights: a batched product."""
    n, b = x.shape[:2]
    images = x.flatten(0, 1)
    if padding != (0, 0):
        images = functional.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    kernel = (int(w.shape[3]), int(w.shape[4]))
    high, wide = ((side - k) // s + 1 for side, k, s in zip(images.shape[2:], kernel, step, strict=True))
    rows: Tensor = Unfold.apply(images, kernel, step)  # type: ignore[no-untyped-call]
    out = torch.bmm(rows.reshape(n, b * high * wide, -1), packed(w))
    if bias is not None:
        out = out + bias[:, None]
    return out.reshape(n, b, high, wide, -1).permute(0, 1, 4, 2, 3)


def grouped(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """The library's grouped convolution, a group for each client."""
    n, b = x.shape[:2]
    side_by_side = x.transpose(0, 1).flatten(1, 2)
    shifts = None if bias is None else bias.flatten()
    out = functional.conv2d(side_by_side, w.flatten(0, 1), shifts, step, padding, groups=n)
    return out.reshape(b, n, -1, *out.shape[2:]).transpose(0, 1)


def each(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """The library's convolution, one client after the other, channels innermost: for few cores."""
    inner: Any = {"memory_format": torch.channels_last}
    shifts = [None] * len(x) if bias is None else bias.unbind()
    outs = [
        functional.conv2d(one.contiguous(**inner), own.contiguous(**inner), shift, step, padding)
        for one, own, shift in zip(x.unbind(), w.unbind(), shifts, strict=True)
    ]
    if len(outs) == 1:
        return outs[0].contiguous(**inner)[None]
    return torch.stack([out.permute(0, 2, 3, 1) for out in outs]).permute(0, 1, 4, 2, 3)


def fused(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """A kernel of our own that reads the patches where they lie."""
    from offbeat.numerics import kernels

    out: Tensor = kernels.Convolve.apply(x, w, bias, step, padding, places)  # type: ignore[no-untyped-call]
    return out


@cache
def methods(device: str, dtype: torch.dtype) -> dict[str, Method]:
    """What can be used on a kind of device for a type of numbers."""
    if device != "cuda":
        return {"product": product, "each": each}
    ours = find_spec("triton") is not None and dtype != torch.float64
    return {"product": product, "grouped": grouped} | ({"fused": fused} if ours else {})


def packed(w: Tensor) -> Tensor:
    """Weights `[n, f, c, kh, kw]` as matrices `[n, kh * kw * c, f]`, channels innermost."""
    return w.permute(0, 3, 4, 2, 1).reshape(w.shape[0], -1, w.shape[1])


class Unfold(torch.autograd.Function):
    """Patches of `[b, c, h, w]` as rows `[b, L, kh * kw * c]`, and their gradient as sums of shifted slices.

    Channels lie innermost, so that both are runs of whole lines of memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Pair, step: Pair) -> Tensor:
        ctx.shape, ctx.kernel, ctx.step = x.shape, kernel, step
        patches = x.permute(0, 2, 3, 1).unfold(1, kernel[0], step[0]).unfold(2, kernel[1], step[1])
        b, high, wide, *_ = patches.shape  # [b, oh, ow, c, kh, kw]
        return patches.permute(0, 1, 2, 4, 5, 3).reshape(b, high * wide, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        b, c, h, w = ctx.shape
        (kh, kw), (sh, sw) = ctx.kernel, ctx.step
        oh, ow = (h - kh) // sh + 1, (w - kw) // sw + 1
        grad = grad.reshape(b, oh, ow, kh, kw, c)
        total = grad.new_zeros(b, h, w, c)
        for i in range(kh):
            for j in range(kw):
                total[:, i : i + sh * (oh - 1) + 1 : sh, j : j + sw * (ow - 1) + 1 : sw] += grad[:, :, :, i, j]
        return total.permute(0, 3, 1, 2), None, None
