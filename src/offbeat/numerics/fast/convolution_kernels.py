"""Triton kernels for convolutions with filters of each client's own.

Images lie as `[n, b, height, width, channels]`; `n` is the client axis. Sums are made in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.numerics.fast.compiling import kernel
from offbeat.numerics.fast.kernels import images, precision, up


class Shape(NamedTuple):
    """A convolution of each client: sizes, stride and padding; all of it known when a kernel is compiled."""

    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel: tuple[int, int]
    step: tuple[int, int]
    padding: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        high = (self.height + 2 * self.padding[0] - self.kernel[0]) // self.step[0] + 1
        wide = (self.width + 2 * self.padding[1] - self.kernel[1]) // self.step[1] + 1
        return high, wide

    def constants(self) -> dict[str, int]:
        """What the kernels below call them."""
        return {
            "B": self.batch, "C": self.channels, "H": self.height, "W": self.width, "F": self.outputs,
            "OH": self.out[0], "OW": self.out[1], "KH": self.kernel[0], "KW": self.kernel[1],
            "SH": self.step[0], "SW": self.step[1], "PH": self.padding[0], "PW": self.padding[1],
        }  # fmt: skip


@triton.jit
def patch_rows(m, OH: tl.constexpr, OW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
               PW: tl.constexpr):  # fmt: skip
    """Sample and upper left pixel of the patches under output pixels m."""
    return m // (OH * OW), (m // OW % OH) * SH - PH, (m % OW) * SW - PW


@kernel("out")
def conv_forward(x, w, bias, out, sn, sb, sc, sh, sw, bn,
                 B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
                 OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
                 SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
                 BM: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr):  # fmt: skip
    """out[n, m, f] = sum_k patch[n, m, k] w[n, k, f] + bias[n, f]; k runs over (tap, channel)."""
    M: tl.constexpr = B * OH * OW
    K: tl.constexpr = KH * KW * C
    n = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    f = tl.program_id(2) * BF + tl.arange(0, BF)
    b, top, left = patch_rows(m, OH, OW, SH, SW, PH, PW)
    base = x + n * sn + b * sb + top * sh + left * sw
    acc = tl.zeros((BM, BF), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        i, j, c = k // C // KW, k // C % KW, k % C
        valid = (m[:, None] < M) & (k[None, :] < K)
        if PH > 0 or PW > 0:
            y, z = top[:, None] + i[None, :], left[:, None] + j[None, :]
            valid = valid & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        patch = tl.load(base[:, None] + (i * sh + j * sw + c * sc)[None, :], mask=valid, other=0.0)
        taps = tl.load(w + n * (K * F) + k[:, None] * F + f[None, :],
                       mask=(k[:, None] < K) & (f[None, :] < F), other=0.0)  # fmt: skip
        acc = tl.dot(patch, taps, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n * bn + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
    where = out + n * (M * F) + m[:, None] * F + f[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(m[:, None] < M) & (f[None, :] < F))


@kernel("out")
def conv_inputs(g, w, out, gn, gb, gf, gh, gw,
                B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
                OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
                SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, PRECISION: tl.constexpr,
                BM: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The gradient of the inputs: out[n, p, c] = sum over taps and outputs of g w; p runs over input pixels."""
    P: tl.constexpr = B * H * W
    K: tl.constexpr = KH * KW * F
    n = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    b, y, z = p // (H * W), p // W % H + PH, p % W + PW
    base = g + n * gn + b * gb
    acc = tl.zeros((BM, BC), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        tap, f = k // F, k % F
        high, wide = y[:, None] - (tap // KW)[None, :], z[:, None] - (tap % KW)[None, :]
        valid = (p[:, None] < P) & (k[None, :] < K) & (high >= 0) & (wide >= 0)
        if SH > 1 or SW > 1:
            valid = valid & (high % SH == 0) & (wide % SW == 0)
            high, wide = high // SH, wide // SW
        valid = valid & (high < OH) & (wide < OW)
        grad = tl.load(base[:, None] + high * gh + wide * gw + (f * gf)[None, :], mask=valid, other=0.0)
        taps = tl.load(w + n * (KH * KW * C * F) + (tap * C * F + f)[:, None] + c[None, :] * F,
                       mask=(k[:, None] < K) & (c[None, :] < C), other=0.0)  # fmt: skip
        acc = tl.dot(grad, taps, acc, input_precision=PRECISION)
    where = out + n * (P * C) + p[:, None] * C + c[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(p[:, None] < P) & (c[None, :] < C))


@kernel("out", "shifts")
def conv_weights(x, g, out, shifts, on, vn, sn, sb, sc, sh, sw, gn, gb, gf, gh, gw, part,
                 B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
                 OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
                 SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, OF: tl.constexpr, OC: tl.constexpr,
                 OT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
                 BF: tl.constexpr):  # fmt: skip
    """The gradients of weights and bias, over one stretch of output pixels: out[part, n, f, c, tap] = sum_m patch g.

    The tiles beyond the last one of the weights make the bias: sum_m g.
    """
    M: tl.constexpr = B * OH * OW
    K: tl.constexpr = KH * KW * C
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile = tl.program_id(0) % (tiles + 1)
    n = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) // (tiles + 1) * BF + tl.arange(0, BF)
    stretch = tl.program_id(2)
    row = stretch * tl.num_programs(1) + n
    if tile == tiles:
        total = tl.zeros((BM, BF), dtype=tl.float32)
        for m0 in range(0, part, BM):
            inside = m0 + tl.arange(0, BM) < part
            m = stretch * part + m0 + tl.arange(0, BM)
            at = g + n * gn + m // (OH * OW) * gb + (m // OW % OH) * gh + (m % OW) * gw
            mask = (m < M)[:, None] & inside[:, None] & (f[None, :] < F)
            total += tl.load(at[:, None] + (f * gf)[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(shifts + row * vn + f, tl.sum(total, axis=0).to(shifts.dtype.element_ty), mask=f < F)
    else:
        k = tile * BK + tl.arange(0, BK)
        i, j, c = k // C // KW, k // C % KW, k % C
        shift = i * sh + j * sw + c * sc
        acc = tl.zeros((BK, BF), dtype=tl.float32)
        for m0 in range(0, part, BM):
            m = stretch * part + m0 + tl.arange(0, BM)
            b, top, left = patch_rows(m, OH, OW, SH, SW, PH, PW)
            inside = (m < M) & (m0 + tl.arange(0, BM) < part)
            valid = inside[None, :] & (k[:, None] < K)
            if PH > 0 or PW > 0:
                y, z = top[None, :] + i[:, None], left[None, :] + j[:, None]
                valid = valid & (y >= 0) & (y < H) & (z >= 0) & (z < W)
            base = x + n * sn + b * sb + top * sh + left * sw
            patch = tl.load(base[None, :] + shift[:, None], mask=valid, other=0.0)
            at = g + n * gn + b * gb + (m // OW % OH) * gh + (m % OW) * gw
            grad = tl.load(at[:, None] + (f * gf)[None, :], mask=inside[:, None] & (f[None, :] < F), other=0.0)
            acc = tl.dot(patch, grad, acc, input_precision=PRECISION)
        where = out + row * on + (f * OF)[None, :] + (c * OC + (i * KW + j) * OT)[:, None]
        tl.store(where, acc.to(out.dtype.element_ty), mask=(k[:, None] < K) & (f[None, :] < F))


class Convolve(torch.autograd.Function):
    """`x [n, b, c, h, w]` (any strides) with `w [n, f, c, kh, kw]` and `bias [n, f]` to `[n, b, f, oh, ow]`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, step: Any, padding: Any, places: Any = None
    ) -> Tensor:
        batch, channels, height, width = x.shape[1:]
        kernel = (int(w.shape[3]), int(w.shape[4]))
        shape = Shape(batch, channels, height, width, w.shape[1], kernel, step, padding)
        taps = w.permute(0, 3, 4, 2, 1).contiguous()  # [n, kh, kw, c, f]
        ctx.save_for_backward(x, taps, w, bias)
        ctx.shape, ctx.places = shape, places
        n, pixels, (high, wide) = len(x), shape.batch * shape.out[0] * shape.out[1], shape.out
        out = images(x, n, shape.batch, shape.outputs, high, wide)
        tiles = {"BM": 256 if pixels >= 4096 else 128, "BK": 32, "BF": up(shape.outputs, 16, 64)}
        grid = (triton.cdiv(pixels, tiles["BM"]), n, triton.cdiv(shape.outputs, tiles["BF"]))
        conv_forward[grid](
            x, taps, taps if bias is None else bias, out, *x.stride(), 0 if bias is None else bias.stride(0),
            **shape.constants(), BIAS=bias is not None, PRECISION=precision(), **tiles, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, taps, w, bias = ctx.saved_tensors
        gx = gw = gb = None
        if ctx.needs_input_grad[1]:
            gw, gb = (None if ctx.places is None else ctx.places.take(t) for t in (w, bias))
            made = weights_gradient(x, g, ctx.shape, gw, gb, bias is not None)
            gw, gb = (None if place is not None else t for place, t in zip((gw, gb), made, strict=True))
        if ctx.needs_input_grad[0]:
            gx = inputs_gradient(g, taps, ctx.shape)
        return gx, gw, gb, None, None, None


def inputs_gradient(g: Tensor, taps: Tensor, shape: Shape) -> Tensor:
    n, pixels = len(g), shape.batch * shape.height * shape.width
    out = g.new_empty((n, shape.batch, shape.height, shape.width, shape.channels))
    tiles = {"BM": 64, "BK": up(shape.outputs, 16, 64), "BC": up(shape.channels, 16, 64)}
    grid = (triton.cdiv(pixels, tiles["BM"]), n, triton.cdiv(shape.channels, tiles["BC"]))
    conv_inputs[grid](g, taps, out, *g.stride(), **shape.constants(), PRECISION=precision(), **tiles, num_warps=4,
                      num_stages=3)  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)


def weights_gradient(
    x: Tensor, g: Tensor, shape: Shape, gw: Tensor | None, gb: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of weights and bias, in the places given if there are any."""
    n, pixels, f = len(g), shape.batch * shape.out[0] * shape.out[1], shape.outputs
    inner = shape.kernel[0] * shape.kernel[1] * shape.channels
    tiles = {"BM": 64, "BK": up(inner, 16, 32), "BF": up(f, 16, 64)}
    across = (triton.cdiv(inner, tiles["BK"]) + 1) * triton.cdiv(f, tiles["BF"])
    parts = max(1, min(pixels // 512, 16 // across))  # a long sum over few tiles would leave the device idle
    taps = shape.kernel[0] * shape.kernel[1]
    sides = (f, shape.channels, *shape.kernel)
    direct = parts == 1
    weights = gw if direct and gw is not None else x.new_empty((parts * n, *sides))
    shifts = gb if direct and gb is not None else x.new_empty((parts * n, f))
    conv_weights[(across, n, parts)](
        x, g, weights, shifts, weights.stride(0), shifts.stride(0), *x.stride(), *g.stride(),
        triton.cdiv(pixels, parts), **shape.constants(), OF=inner, OC=taps, OT=1, PRECISION=precision(), **tiles,
        num_warps=2 if shape.channels >= 16 else 4, num_stages=3,
    )  # fmt: skip
    if not direct:
        weights = torch.sum(weights.reshape(parts, n, *sides), 0, out=gw)
        shifts = torch.sum(shifts.reshape(parts, n, f), 0, out=gb)
    return weights, shifts if bias else None
