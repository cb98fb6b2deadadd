"""Triton kernels for layer normalisation with scales and shifts of each client's own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.numerics.fast.places import Places, into

ROWS = 16  # rows whose shares of a scale's gradient one program adds up


@triton.jit
def forward(x, weight, bias, out, mean, scale, rows, wn, bn, eps, D: tl.constexpr, BIAS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    client, d = row // rows, tl.arange(0, BLOCK)
    inside = d < D
    v = tl.load(x + row * D + d, inside, 0.0)
    m = tl.sum(v, 0) / D
    centred = tl.where(inside, v - m, 0.0)
    s = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    result = centred * s * tl.load(weight + client * wn + d, inside, 0.0)
    if BIAS:
        result += tl.load(bias + client * bn + d, inside, 0.0)
    tl.store(out + row * D + d, result, inside)
    tl.store(mean + row, m)
    tl.store(scale + row, s)


@triton.jit
def backward(x, weight, g, mean, scale, gx, gw, gb, rows, parts, wn, D: tl.constexpr, BIAS: tl.constexpr,
             ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program takes some rows of one client: their slopes, and their shares of the slopes of scale and shift."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    by = tl.load(weight + client * wn + d, inside, 0.0)
    of_scale, of_shift = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for k in range(ROWS):
        r = part * ROWS + k
        if r < rows:
            row = client * rows + r
            s = tl.load(scale + row)
            v = tl.where(inside, (tl.load(x + row * D + d, inside, 0.0) - tl.load(mean + row)) * s, 0.0)
            slope = tl.load(g + row * D + d, inside, 0.0)
            of_scale += slope * v
            of_shift += slope
            h = slope * by
            back = (h - tl.sum(h, 0) / D - v * (tl.sum(h * v, 0) / D)) * s
            tl.store(gx + row * D + d, back, inside)
    at = (client * parts + part) * D + d
    tl.store(gw + at, of_scale, inside)
    if BIAS:
        tl.store(gb + at, of_shift, inside)


class LayerNorm(torch.autograd.Function):
    """`x [n, rows, d]`, `weight [n, d]` and `bias [n, d]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, places: Places | None) -> Tensor:
        x, weight = x.contiguous(), rows_of(weight)
        shift = weight if bias is None else rows_of(bias)
        n, rows, d = x.shape
        out, mean, scale = torch.empty_like(x), x.new_empty(n, rows), x.new_empty(n, rows)
        forward[(n * rows,)](
            x, weight, shift, out, mean, scale, rows, weight.stride(0), shift.stride(0), eps, D=d,
            BIAS=bias is not None, BLOCK=triton.next_power_of_2(d), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.places = places
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, bias, mean, scale = ctx.saved_tensors
        n, rows, d = x.shape
        parts = triton.cdiv(rows, ROWS)
        gx, gw = torch.empty_like(x), x.new_empty(n, parts, d)
        gb = gw if bias is None else torch.empty_like(gw)
        backward[(n, parts)](
            x, weight, g.contiguous(), mean, scale, gx, gw, gb, rows, parts, weight.stride(0), D=d,
            BIAS=bias is not None, ROWS=ROWS, BLOCK=triton.next_power_of_2(d), num_warps=4,
        )  # fmt: skip
        places = ctx.places or Places((), ())
        by = into(places.take(weight), lambda at: torch.sum(gw, 1, out=at))
        shift = None if bias is None else into(places.take(bias), lambda at: torch.sum(gb, 1, out=at))
        return gx, by, shift, None, None


def rows_of(t: Tensor) -> Tensor:
    """The tensor itself, so that it keeps its place, if its rows are lines of memory."""
    return t if t.stride(-1) == 1 else t.contiguous()
