"""Triton kernels for depthwise convolutions of each client's own: every channel has one small filter.

Images lie as `[n b, height, width, channels]`; filters as `[n, channels, taps]`. Sums are made in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.numerics.fast.compiling import kernel
from offbeat.numerics.fast.kernels import images
from offbeat.numerics.fast.places import Places, into

PIXELS, CHANNELS = 32, 32  # of a program
FEW = 8  # pixels that a program takes at once to all taps of a filter
SLICES = 256  # pixels whose shares of a filter's gradient one program adds up


@kernel("out")
def spread(x, w, bias, out, batch, xb, xc, xh, xw, H, W, OH, OW, wn, bn, C: tl.constexpr, KH: tl.constexpr,
           KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BIAS: tl.constexpr,
           PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """out[pixel, c] = sum over taps of x[pixel * stride - padding + tap, c] w[c, tap]."""
    row = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)[:, None]
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None]
    high, wide, client = pixel // OW, pixel % OW, row // batch
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            h, k = high * SH - PH + i, wide * SW - PW + j
            inside = (h >= 0) & (h < H) & (k >= 0) & (k < W) & (c < C) & (high < OH)
            v = tl.load(x + row * xb + h * xh + k * xw + c * xc, inside, 0.0)
            total += v * tl.load(w + client * wn + c * (KH * KW) + i * KW + j, c < C, 0.0)
    if BIAS:
        total += tl.load(bias + client * bn + c, c < C, 0.0)
    tl.store(out + (row * OH * OW + pixel) * C + c, total, (high < OH) & (c < C))


@kernel("out")
def gather(g, w, out, batch, gb, gc, gh, gw, H, W, OH, OW, wn, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
           SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, PIXELS: tl.constexpr,
           CHANNELS: tl.constexpr):  # fmt: skip
    """The slope of the inputs: each pixel gathers from the outputs that it had a share in."""
    row = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)[:, None]
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None]
    high, wide, client = pixel // W, pixel % W, row // batch
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            up, left = high + PH - i, wide + PW - j
            h, k = up // SH, left // SW
            whole = (up >= 0) & (left >= 0) & (up % SH == 0) & (left % SW == 0)
            inside = whole & (h < OH) & (k < OW) & (c < C) & (high < H)
            v = tl.load(g + row * gb + h * gh + k * gw + c * gc, inside, 0.0)
            total += v * tl.load(w + client * wn + c * (KH * KW) + i * KW + j, c < C, 0.0)
    tl.store(out + (row * H * W + pixel) * C + c, total, (high < H) & (c < C))


@kernel("out", "shifts")
def filters(x, g, out, shifts, xb, xc, xh, xw, gb, gc, gh, gw, H, W, OH, OW, parts, C: tl.constexpr, KH: tl.constexpr,
            KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
            BIAS: tl.constexpr, SLICES: tl.constexpr, FEW: tl.constexpr, TAPS: tl.constexpr, PIXELS: tl.constexpr,
            CHANNELS: tl.constexpr):  # fmt: skip
    """Shares `[n b, parts, c, taps]` of the slope of the filters, each of some pixels of one sample."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    tap = tl.arange(0, TAPS)
    total, shift = tl.zeros((TAPS, FEW, CHANNELS), tl.float32), tl.zeros((FEW, CHANNELS), tl.float32)
    for first in range(0, SLICES, FEW):
        pixel = part * SLICES + first + tl.arange(0, FEW)
        high, wide = pixel // OW, pixel % OW
        held = (high < OH)[:, None] & (c < C)[None]
        slope = tl.load(g + row * gb + (high * gh + wide * gw)[:, None] + (c * gc)[None], held, 0.0)
        h, k = (high * SH - PH)[None] + (tap // KW)[:, None], (wide * SW - PW)[None] + (tap % KW)[:, None]
        inside = (h >= 0) & (h < H) & (k >= 0) & (k < W) & (high < OH)[None] & (tap < KH * KW)[:, None]
        at = x + row * xb + (h * xh + k * xw)[:, :, None] + (c * xc)[None, None]
        total += tl.load(at, inside[:, :, None] & (c < C)[None, None], 0.0) * slope[None]
        if BIAS:
            shift += slope
    place = row * parts + part
    at = out + (place * C + c)[None] * (KH * KW) + tap[:, None]
    tl.store(at, tl.sum(total, 1), (tap < KH * KW)[:, None] & (c < C)[None])
    if BIAS:
        tl.store(shifts + place * C + c, tl.sum(shift, 0), c < C)


class Depthwise(torch.autograd.Function):
    """`x [n, b, c, h, w]`, `weight [n, c, 1, kh, kw]` and `bias [n, c]` to `[n, b, c, oh, ow]`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, step: Any, padding: Any, places: Places | None
    ) -> Tensor:
        n, b, c, high, wide = x.shape
        kernel = (int(weight.shape[3]), int(weight.shape[4]))
        sides = [(s + 2 * p - k) // t + 1 for s, p, k, t in zip((high, wide), padding, kernel, step, strict=True)]
        x = x if x.stride(0) == b * x.stride(1) else x.contiguous()
        taps = weight if weight[0].is_contiguous() else weight.contiguous()
        shift = taps if bias is None else bias if bias.stride(1) == 1 else bias.contiguous()
        out = images(x, n, b, c, *sides)
        ctx.form = {"C": c, "KH": kernel[0], "KW": kernel[1], "SH": step[0], "SW": step[1], "PH": padding[0],
                    "PW": padding[1], "PIXELS": PIXELS,
                    "CHANNELS": min(CHANNELS, triton.next_power_of_2(c))}  # fmt: skip
        ctx.sides = (high, wide, *sides)
        grid = (n * b, triton.cdiv(sides[0] * sides[1], PIXELS), triton.cdiv(c, ctx.form["CHANNELS"]))
        spread[grid](x, taps, shift, out, b, *x.stride()[1:], *ctx.sides, taps.stride(0), shift.stride(0),
                     BIAS=bias is not None, **ctx.form)  # fmt: skip
        ctx.save_for_backward(x, taps, weight, bias)
        ctx.places = places
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, taps, weight, bias = ctx.saved_tensors
        n, b, c, high, wide = x.shape
        g = g if g.stride(0) == b * g.stride(1) else g.contiguous()
        blocks = triton.cdiv(c, ctx.form["CHANNELS"])
        gx = None
        if ctx.needs_input_grad[0]:
            gx = images(x, n, b, c, high, wide)
            grid = (n * b, triton.cdiv(high * wide, PIXELS), blocks)
            gather[grid](g, taps, gx, b, *g.stride()[1:], *ctx.sides, taps.stride(0), **ctx.form)
        parts = triton.cdiv(ctx.sides[2] * ctx.sides[3], SLICES)
        shares = x.new_empty(n, b * parts, *weight.shape[1:])
        shifts = shares if bias is None else x.new_empty(n, b * parts, c)
        filters[(n * b, parts, blocks)](
            x, g, shares, shifts, *x.stride()[1:], *g.stride()[1:], *ctx.sides, parts, BIAS=bias is not None,
            SLICES=SLICES, FEW=FEW, TAPS=triton.next_power_of_2(weight[0, 0].numel()), **ctx.form,
        )  # fmt: skip
        places = ctx.places or Places((), ())
        gw = into(places.take(weight), lambda at: torch.sum(shares, 1, out=at))
        gb = None if bias is None else into(places.take(bias), lambda at: torch.sum(shifts, 1, out=at))
        return gx, gw, gb, None, None, None
