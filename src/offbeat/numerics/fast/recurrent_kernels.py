"""Triton kernels for one time of a recurrent layer: all that happens between two products, in one pass.

Rows are (client, sample); a row's numbers lie one beside the other, rows where their strides say. Each function writes
into the tensors it is given, as its namesake in `recurrent.py` does by PyTorch's operations.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def lstm_forward_kernel(gates, c, cell, out, gn, gb, cn, cb, en, eb, on, ob, B, H, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, b, inside = row // B, row % B, d < H
    g = gates + n * gn + b * gb + d
    i, f = sigmoid(tl.load(g, inside)), sigmoid(tl.load(g + H, inside))
    u, o = tanh(tl.load(g + 2 * H, inside)), sigmoid(tl.load(g + 3 * H, inside))
    now = f * tl.load(c + n * cn + b * cb + d, inside) + i * u
    tl.store(g, i, inside)
    tl.store(g + H, f, inside)
    tl.store(g + 2 * H, u, inside)
    tl.store(g + 3 * H, o, inside)
    tl.store(cell + n * en + b * eb + d, now, inside)
    tl.store(out + n * on + b * ob + d, o * tanh(now), inside)


def lstm_forward(gates: Tensor, c: Tensor, cell: Tensor, out: Tensor) -> None:
    grid, sizes = form(cell)
    lstm_forward_kernel[grid](gates, c, cell, out, *lines(gates, c, cell, out), *sizes, BLOCK=BLOCK)


@triton.jit
def lstm_backward_kernel(gates, before, cell, g_out, dh, dc, slopes, gn, gb, bn, bb, en, eb, on, ob, hn, hb, cn, cb, sn,
                         sb, B, H, BLOCK: tl.constexpr):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, b, inside = row // B, row % B, d < H
    g = gates + n * gn + b * gb + d
    i, f, u, o = tl.load(g, inside), tl.load(g + H, inside), tl.load(g + 2 * H, inside), tl.load(g + 3 * H, inside)
    bent = tanh(tl.load(cell + n * en + b * eb + d, inside))
    of_h = tl.load(g_out + n * on + b * ob + d, inside) + tl.load(dh + n * hn + b * hb + d, inside)
    at = dc + n * cn + b * cb + d
    of_c = tl.load(at, inside) + of_h * o * (1 - bent * bent)
    s = slopes + n * sn + b * sb + d
    tl.store(s, of_c * u * i * (1 - i), inside)
    tl.store(s + H, of_c * tl.load(before + n * bn + b * bb + d, inside) * f * (1 - f), inside)
    tl.store(s + 2 * H, of_c * i * (1 - u * u), inside)
    tl.store(s + 3 * H, of_h * bent * o * (1 - o), inside)
    tl.store(at, of_c * f, inside)


def lstm_backward(
    gates: Tensor, before: Tensor, cell: Tensor, g_out: Tensor, dh: Tensor, dc: Tensor, slopes: Tensor
) -> None:
    given = (gates, before, cell, g_out, dh, dc, slopes)
    grid, sizes = form(cell)
    lstm_backward_kernel[grid](*given, *lines(*given), *sizes, BLOCK=BLOCK)


@triton.jit
def gru_forward_kernel(gates, own, h, share, out, gn, gb, wn, wb, hn, hb, en, eb, on, ob, B, H, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, b, inside = row // B, row % B, d < H
    g, w = gates + n * gn + b * gb + d, own + n * wn + b * wb + d
    r = sigmoid(tl.load(g, inside) + tl.load(w, inside))
    z = sigmoid(tl.load(g + H, inside) + tl.load(w + H, inside))
    kept = tl.load(w + 2 * H, inside)
    new = tanh(tl.load(g + 2 * H, inside) + r * kept)
    tl.store(g, r, inside)
    tl.store(g + H, z, inside)
    tl.store(g + 2 * H, new, inside)
    tl.store(share + n * en + b * eb + d, kept, inside)
    tl.store(out + n * on + b * ob + d, new + z * (tl.load(h + n * hn + b * hb + d, inside) - new), inside)


def gru_forward(gates: Tensor, own: Tensor, h: Tensor, share: Tensor, out: Tensor) -> None:
    given = (gates, own, h, share, out)
    grid, sizes = form(share)
    gru_forward_kernel[grid](*given, *lines(*given), *sizes, BLOCK=BLOCK)


@triton.jit
def gru_backward_kernel(gates, share, before, g_out, dh, slopes, own, gn, gb, en, eb, bn, bb, on, ob, hn, hb, sn, sb,
                        wn, wb, B, H, BLOCK: tl.constexpr):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, b, inside = row // B, row % B, d < H
    g = gates + n * gn + b * gb + d
    r, z, new = tl.load(g, inside), tl.load(g + H, inside), tl.load(g + 2 * H, inside)
    at = dh + n * hn + b * hb + d
    of_h = tl.load(at, inside) + tl.load(g_out + n * on + b * ob + d, inside)
    of_z = of_h * (tl.load(before + n * bn + b * bb + d, inside) - new) * z * (1 - z)
    of_new = of_h * (1 - z) * (1 - new * new)
    of_r = of_new * tl.load(share + n * en + b * eb + d, inside) * r * (1 - r)
    s, w = slopes + n * sn + b * sb + d, own + n * wn + b * wb + d
    tl.store(s, of_r, inside)
    tl.store(s + H, of_z, inside)
    tl.store(s + 2 * H, of_new, inside)
    tl.store(w, of_r, inside)
    tl.store(w + H, of_z, inside)
    tl.store(w + 2 * H, of_new * r, inside)
    tl.store(at, of_h * z, inside)


def gru_backward(
    gates: Tensor, share: Tensor, before: Tensor, g_out: Tensor, dh: Tensor, slopes: Tensor, own: Tensor
) -> None:
    given = (gates, share, before, g_out, dh, slopes, own)
    grid, sizes = form(share)
    gru_backward_kernel[grid](*given, *lines(*given), *sizes, BLOCK=BLOCK)


def form(like: Tensor) -> tuple[Any, tuple[int, int]]:
    """The grid for `like [n, b, h]`, and b and h."""
    n, b, h = like.shape
    return (n * b, triton.cdiv(h, BLOCK)), (b, h)


def lines(*tensors: Tensor) -> list[int]:
    """Where rows begin: strides of clients and of samples."""
    return [stride for t in tensors for stride in t.stride()[:2]]
