"""Triton kernels for normalisation of layers and of groups of channels, with scales and shifts of each client's own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.numerics.fast.compiling import kernel
from offbeat.numerics.fast.places import Places, into

ROWS = 16  # rows whose shares of a scale's gradient one program adds up


@kernel("out", "mean", "scale")
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


@kernel("gx", "gw", "gb")
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


# ---- groups of channels -------------------------------------------------------------------------
RUN = 32  # channels that a program takes at least where they lie beside each other, so that it reads whole runs
TILE = 16384  # numbers that a program holds


@triton.jit
def of_group(v, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """For each channel the sum over its group; the channels are GROUPS x SIZE."""
    total = tl.sum(tl.reshape(v, (GROUPS, SIZE)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (GROUPS, SIZE)), (GROUPS * SIZE, 1))


@kernel("out", "mean", "scale")
def group_forward(x, weight, bias, out, mean, scale, batch, xb, xc, xp, ob, oc, op, wn, bn, eps, C: tl.constexpr,
                  P: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, BC: tl.constexpr,
                  BP: tl.constexpr):  # fmt: skip
    """A program takes some groups of one sample: `[GROUPS x GROUP channels, P pixels]`."""
    row = tl.program_id(0).to(tl.int64)
    c, pixel = tl.arange(0, BC)[:, None], tl.arange(0, BP)[None]
    channel, client = tl.program_id(1) * (GROUPS * GROUP) + c, row // batch
    held = (c < GROUPS * GROUP) & (channel < C)
    at = x + row * xb + channel * xc
    total = tl.zeros((BC, BP), tl.float32)
    for first in range(0, P, BP):
        total += tl.load(at + (first + pixel) * xp, held & (first + pixel < P), 0.0)
    m = of_group(tl.sum(total, 1), GROUPS, BC // GROUPS) / (GROUP * P)
    total = tl.zeros((BC, BP), tl.float32)
    for first in range(0, P, BP):
        inside = held & (first + pixel < P)
        v = tl.where(inside, tl.load(at + (first + pixel) * xp, inside, 0.0) - m, 0.0)
        total += v * v
    s = 1.0 / tl.sqrt(of_group(tl.sum(total, 1), GROUPS, BC // GROUPS) / (GROUP * P) + eps)
    by = tl.load(weight + client * wn + channel, held, 0.0) * s
    shift = -m * by
    if BIAS:
        shift += tl.load(bias + client * bn + channel, held, 0.0)
    for first in range(0, P, BP):
        inside = held & (first + pixel < P)
        v = tl.load(at + (first + pixel) * xp, inside, 0.0)
        tl.store(out + row * ob + channel * oc + (first + pixel) * op, v * by + shift, inside)
    place = row * (C // GROUP) + channel // GROUP
    tl.store(mean + place, m, held & (c % GROUP == 0))
    tl.store(scale + place, s, held & (c % GROUP == 0))


@kernel("gx", "gw", "gb")
def group_backward(x, weight, g, mean, scale, gx, gw, gb, batch, xb, xc, xp, sb, sc, sp, ob, oc, op, wn,
                   C: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BC: tl.constexpr,
                   BP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c, pixel = tl.arange(0, BC)[:, None], tl.arange(0, BP)[None]
    channel, client = tl.program_id(1) * (GROUPS * GROUP) + c, row // batch
    held = (c < GROUPS * GROUP) & (channel < C)
    place = row * (C // GROUP) + channel // GROUP
    m, s = tl.load(mean + place, held, 0.0), tl.load(scale + place, held, 0.0)
    of_scale, of_shift = tl.zeros((BC, BP), tl.float32), tl.zeros((BC, BP), tl.float32)
    for first in range(0, P, BP):
        inside = held & (first + pixel < P)
        v = (tl.load(x + row * xb + channel * xc + (first + pixel) * xp, inside, 0.0) - m) * s
        slope = tl.load(g + row * sb + channel * sc + (first + pixel) * sp, inside, 0.0)
        of_scale += slope * v
        of_shift += slope
    own_scale, own_shift = tl.sum(of_scale, 1)[:, None], tl.sum(of_shift, 1)[:, None]
    tl.store(gw + row * C + channel, own_scale, held)
    tl.store(gb + row * C + channel, own_shift, held)
    by = tl.load(weight + client * wn + channel, held, 0.0)
    along = of_group(by * own_scale, GROUPS, BC // GROUPS) / (GROUP * P)
    level = of_group(by * own_shift, GROUPS, BC // GROUPS) / (GROUP * P)
    for first in range(0, P, BP):
        inside = held & (first + pixel < P)
        v = (tl.load(x + row * xb + channel * xc + (first + pixel) * xp, inside, 0.0) - m) * s
        slope = tl.load(g + row * sb + channel * sc + (first + pixel) * sp, inside, 0.0)
        back = (slope * by - level - v * along) * s
        tl.store(gx + row * ob + channel * oc + (first + pixel) * op, back, inside)


class GroupNorm(torch.autograd.Function):
    """`x [n, b, c, ...]`, `weight [n, c]` and `bias [n, c]`, in the layout that x has."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor | None, eps: float, places: Places | None
    ) -> Tensor:
        n, b, c = x.shape[:3]
        x, weight = dense(x), rows_of(weight)
        shift = weight if bias is None else rows_of(bias)
        out = torch.empty_like(x)
        mean, scale = x.new_empty(n * b, groups), x.new_empty(n * b, groups)
        pixels, ctx.form = blocks(x, groups)
        group_forward[(n * b, triton.cdiv(groups, ctx.form["GROUPS"]))](
            x, weight, shift, out, mean, scale, b, *strides(x), *strides(out), weight.stride(0), shift.stride(0), eps,
            C=c, P=pixels, BIAS=bias is not None, **ctx.form,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.groups, ctx.places = groups, places
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, bias, mean, scale = ctx.saved_tensors
        n, b, c = x.shape[:3]
        g, gx = dense(g), torch.empty_like(x)
        gw, gb = x.new_empty(n, b, c), x.new_empty(n, b, c)
        group_backward[(n * b, triton.cdiv(ctx.groups, ctx.form["GROUPS"]))](
            x, weight, g, mean, scale, gx, gw, gb, b, *strides(x), *strides(g), *strides(gx), weight.stride(0),
            C=c, P=blocks(x, ctx.groups)[0], **ctx.form,
        )  # fmt: skip
        places = ctx.places or Places((), ())
        by = into(places.take(weight), lambda at: torch.sum(gw, 1, out=at))
        shift = None if bias is None else into(places.take(bias), lambda at: torch.sum(gb, 1, out=at))
        return gx, None, by, shift, None, None


def blocks(x: Tensor, groups: int) -> tuple[int, dict[str, int]]:
    """Pixels of a sample, and how a program takes them: one group, or several small ones that lie beside each other."""
    group, pixels = x.shape[2] // groups, x[0, 0, 0].numel()
    wide = triton.next_power_of_2(group)
    together = max(1, RUN // wide) if wide == group and x.stride(2) == 1 else 1
    high = wide * together
    long = max(1, min(triton.next_power_of_2(pixels), TILE // high))
    return pixels, {
        "GROUP": group, "GROUPS": together, "BC": high, "BP": long, "num_warps": max(1, min(16, high * long // 1024)),
    }  # fmt: skip


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of samples, channels and pixels in `[n, b, c, ...]`."""
    return x.stride(1), x.stride(2), x.stride(-1) if x.dim() > 3 else 0


def dense(x: Tensor) -> Tensor:
    """Samples one after the other, and pixels at one distance from each other."""
    steps, sides = x.stride(), x.shape
    even = all(steps[i] == steps[i + 1] * sides[i + 1] for i in range(3, x.dim() - 1)) and x.shape[1] > 0
    return x if even and steps[0] == steps[1] * sides[1] else x.contiguous()
