"""Convolutions with a kernel of each client's own, by the method that suits the shape and the device.

`x [n, b, c, h, w]`, `w [n, f, c, kh, kw]` and `bias [n, f]` give `[n, b, f, oh, ow]`. All methods compute the same
sums in another order, so which one is taken follows from a rule and never from a measurement of the moment: the bits of
a run hang on it. The rule was read off `benchmarks/convolutions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import compiled
from offbeat.numerics.fast.places import parted

Pair: TypeAlias = tuple[int, int]
Method: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Pair, Pair, Any], Tensor]

TINY = 1 << 17  # multiply-adds of a client below which calling the library for each costs more than the arithmetic


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """The convolution of n clients; `places` are where it may write its gradients."""
    name = rule(x, w, step, padding)
    return METHODS[name](x, w, bias, step, padding, places)


def rule(x: Tensor, w: Tensor, step: Pair, padding: Pair) -> str:
    """The name of the method. The number of clients is not in it: waves of all sizes take the same."""
    f, c, kh, kw = w.shape[1:]
    if x.is_cuda:
        if x.dtype == torch.float64 or not compiled():
            return "product"
        rounded = x.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
        if rounded:  # tensor cores are quick enough that reading patches where they lie wins, but for many channels
            return "fused" if c < 256 else "product"
        small = f <= 64 and kh * kw <= 9 and (step == (1, 1) or kh * kw == 1)
        return "fused" if small or not x.requires_grad else "product"
    pixels = [(side + 2 * p - k) // s + 1 for side, p, k, s in zip(x.shape[3:], padding, (kh, kw), step, strict=True)]
    light = x.shape[1] * f * c * kh * kw * pixels[0] * pixels[1] < TINY
    return "product" if kh * kw == 1 or light else "each"


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


def each(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """The library's convolution, one client after the other, for few cores: channels innermost, unless the weights that
    would have to be turned are more than the images."""
    turned = w[0].numel() <= x[0].numel()
    inner: Any = {"memory_format": torch.channels_last if turned else torch.contiguous_format}
    shifts: Any = [None] * len(x) if bias is None else parted(bias)
    outs = [
        functional.conv2d(one.contiguous(**inner), own.contiguous(**inner), shift, step, padding)
        for one, own, shift in zip(parted(x), parted(w), shifts, strict=True)
    ]
    if len(outs) == 1:
        return outs[0].contiguous(**inner)[None]
    if not turned:
        return torch.stack(outs)
    return torch.stack([out.permute(0, 2, 3, 1) for out in outs]).permute(0, 1, 4, 2, 3)


def fused(x: Tensor, w: Tensor, bias: Tensor | None, step: Pair, padding: Pair, places: Any = None) -> Tensor:
    """A kernel of our own that reads the patches where they lie."""
    from offbeat.numerics.fast.convolution_kernels import Convolve

    out: Tensor = Convolve.apply(x, w, bias, step, padding, places)  # type: ignore[no-untyped-call]
    return out


METHODS: dict[str, Method] = {"each": each, "fused": fused, "product": product}


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
