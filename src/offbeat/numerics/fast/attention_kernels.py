"""Triton kernels for attention over short sequences, from and to tensors as a model's layers leave them.

A program takes queries of one sequence and one head, and all of its keys at once, so sums are made in a fixed order.
Heads lie beside each other in memory, as the layer after wants them: nothing is copied on the way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.numerics.fast.compiling import kernel
from offbeat.numerics.fast.kernels import precision, up


@triton.jit
def weighed(q, keys, t, s, scale, T: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Scores of queries t for keys s, hidden ones at minus infinity."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    seen = (t < T)[:, None] & (s < S)[None, :]
    if CAUSAL:
        seen = seen & (s[None, :] <= t[:, None])
    return tl.where(seen, scores, float("-inf"))


@kernel("out", "levels")
def attend(q, k, v, out, levels, qn, qb, qh, qt, kn, kb, kh, ks, vn, vb, vh, vs, B, H, scale, T: tl.constexpr,
           S: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr,
           BS: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """out[t] = sum_s softmax_s(scale q[t] k[s]) v[s]; the level of a query is the logarithm of the softmax's sum."""
    row = tl.program_id(0).to(tl.int64)
    n, b, h = row // (B * H), row // H % B, row % H
    t, s, d = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    asked, held = (t < T)[:, None] & (d < D)[None, :], (s < S)[:, None] & (d < D)[None, :]
    queries = tl.load(q + n * qn + b * qb + h * qh + t[:, None] * qt + d[None, :], asked, 0.0)
    keys = tl.load(k + n * kn + b * kb + h * kh + s[:, None] * ks + d[None, :], held, 0.0)
    values = tl.load(v + n * vn + b * vb + h * vh + s[:, None] * vs + d[None, :], held, 0.0)
    scores = weighed(queries, keys, t, s, scale, T, S, CAUSAL, PRECISION)
    most = tl.max(scores, 1)
    most = tl.where(t < T, most, 0.0)
    shares = tl.exp(scores - most[:, None])
    total = tl.sum(shares, 1)
    total = tl.where(t < T, total, 1.0)
    result = tl.dot(shares / total[:, None], values, input_precision=PRECISION)
    tl.store(out + (((n * B + b) * T + t[:, None]) * H + h) * D + d[None, :], result, asked)
    tl.store(levels + row * T + t, most + tl.log(total), t < T)


@kernel("gq", "gk", "gv")
def slopes(q, k, v, out, levels, g, gq, gk, gv, qn, qb, qh, qt, kn, kb, kh, ks, vn, vb, vh, vs, gn, gb, gh, gt, B, H,
           scale, T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
           BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The slopes of one sequence and head; those of keys and values are summed over queries in their order."""
    row = tl.program_id(0).to(tl.int64)
    n, b, h = row // (B * H), row // H % B, row % H
    s, d = tl.arange(0, BS), tl.arange(0, BD)
    held = (s < S)[:, None] & (d < D)[None, :]
    keys = tl.load(k + n * kn + b * kb + h * kh + s[:, None] * ks + d[None, :], held, 0.0)
    values = tl.load(v + n * vn + b * vb + h * vh + s[:, None] * vs + d[None, :], held, 0.0)
    of_keys, of_values = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BD), tl.float32)
    for first in range(0, T, BT):
        t = first + tl.arange(0, BT)
        asked = (t < T)[:, None] & (d < D)[None, :]
        at = (((n * B + b) * T + t[:, None]) * H + h) * D + d[None, :]
        queries = tl.load(q + n * qn + b * qb + h * qh + t[:, None] * qt + d[None, :], asked, 0.0)
        slope = tl.load(g + n * gn + b * gb + h * gh + t[:, None] * gt + d[None, :], asked, 0.0)
        level = tl.sum(slope * tl.load(out + at, asked, 0.0), 1)
        scores = weighed(queries, keys, t, s, scale, T, S, CAUSAL, PRECISION)
        shares = tl.exp(scores - tl.load(levels + row * T + t, t < T, 0.0)[:, None])
        of_values = tl.dot(tl.trans(shares), slope, of_values, input_precision=PRECISION)
        of_shares = tl.dot(slope, tl.trans(values), input_precision=PRECISION)
        of_scores = shares * (of_shares - level[:, None]) * scale
        of_keys = tl.dot(tl.trans(of_scores), queries, of_keys, input_precision=PRECISION)
        tl.store(gq + at, tl.dot(of_scores, keys, input_precision=PRECISION), asked)
    at = (((n * B + b) * S + s[:, None]) * H + h) * D + d[None, :]
    tl.store(gk + at, of_keys, held)
    tl.store(gv + at, of_values, held)


class Attend(torch.autograd.Function):
    """`q [n, b, h, t, d]`, `k` and `v [n, b, h, s, d]`, of any strides."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        n, b, h, length, d = q.shape
        ctx.form = {
            "T": length, "S": k.shape[3], "D": d, "CAUSAL": causal, "PRECISION": precision(),
            "BS": up(k.shape[3]), "BD": up(d, 16, 64), "num_stages": 1,
        }  # fmt: skip
        large = ctx.form["BS"] * ctx.form["BD"] > 2048  # less at once, so that it fits on small devices, too
        ctx.form |= {"BT": up(length, 16, 32 if large else 64), "num_warps": 8 if large else 4}
        ctx.scale = scale
        out, levels = beside(q), q.new_empty(n * b * h, length)
        attend[(n * b * h, triton.cdiv(length, ctx.form["BT"]))](
            q, k, v, out, levels, *q.stride()[:4], *k.stride()[:4], *v.stride()[:4], b, h, scale, **ctx.form
        )
        ctx.save_for_backward(q, k, v, out, levels)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, out, levels = ctx.saved_tensors
        g = g if g.stride(-1) == 1 else g.contiguous()
        gq, gk, gv = beside(q), beside(k), beside(v)
        slopes[(levels.shape[0],)](
            q, k, v, out, levels, g, gq, gk, gv, *q.stride()[:4], *k.stride()[:4], *v.stride()[:4], *g.stride()[:4],
            q.shape[1], q.shape[2], ctx.scale, **ctx.form,
        )  # fmt: skip
        return gq, gk, gv, None, None


def beside(like: Tensor) -> Tensor:
    """Room for `[n, b, h, t, d]`, in memory `[n, b, t, h, d]`. It is no view, so a module may change it in place."""
    n, b, h, t, d = like.shape
    return like.new_empty_strided((n, b, h, t, d), (b * t * h * d, t * h * d, d, h * d, 1))
