"""Triton kernels for waves on a GPU: pooling, cross-entropy, the step, draws and dropout; what all kernels share.

Imported only where tensors lie on a CUDA device and Triton is there. Images lie as `[n, b, height, width, channels]`,
so that every load is a run of channels; `n` is the client axis. Sums are made in a fixed order (no atomic adds), so
the same wave gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.numerics.fast.compiling import kernel


def up(size: int, least: int = 16, most: int = 128) -> int:
    """The power of two that a tile takes for a side of this size."""
    return max(least, min(most, 1 << (size - 1).bit_length()))


def precision() -> str:
    """How products of float32 numbers are made: as the rest of PyTorch is told to."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def images(like: Tensor, n: int, batch: int, channels: int, high: int, wide: int) -> Tensor:
    """Room for `[n, b, c, h, w]`, channels innermost. It is no view, so a module may change it in place."""
    each = high * wide * channels
    steps = (batch * each, each, 1, wide * channels, channels)
    return like.new_empty_strided((n, batch, channels, high, wide), steps)


# ---- pooling ------------------------------------------------------------------------------------
@kernel("out", "index")
def pool_forward(x, out, index, total, sb, sc, sh, sw, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
                 KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The largest of each KH x KW block and its place in it, the first one of equals; NaN wins."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, wide, high, b = at % C, at // C % OW, at // (C * OW) % OH, at // (C * OW * OH)
    corner = x + b * sb + c * sc + high * KH * sh + wide * KW * sw
    best = tl.load(corner, mask=at < total, other=0.0)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for tap in tl.static_range(1, KH * KW):
        value = tl.load(corner + tap // KW * sh + tap % KW * sw, mask=at < total, other=0.0)
        better = (value > best) | ((value != value) & (best == best))
        best = tl.where(better, value, best)
        place = tl.where(better, tap, place)
    tl.store(out + at, best, mask=at < total)
    tl.store(index + at, place.to(tl.uint8), mask=at < total)


@kernel("out")
def pool_backward(g, index, out, total, gb, gc, gh, gw, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                  OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Every input pixel takes the gradient of its block if it was the largest, else 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, wide, high, b = at % C, at // C % W, at // (C * W) % H, at // (C * W * H)
    oh, ow = high // KH, wide // KW
    inside = (at < total) & (oh < OH) & (ow < OW)
    place = tl.load(index + ((b * OH + oh) * OW + ow) * C + c, mask=inside, other=255).to(tl.int32)
    grad = tl.load(g + b * gb + c * gc + oh * gh + ow * gw, mask=inside, other=0.0)
    tl.store(out + at, tl.where(place == (high % KH) * KW + wide % KW, grad, 0.0), mask=at < total)


class Pool(torch.autograd.Function):
    """Max-pooling of `[b, c, h, w]` in blocks that do not overlap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int]) -> Tensor:
        (b, c, h, w), (kh, kw) = x.shape, kernel
        high, wide = h // kh, w // kw
        out = images(x, 1, b, c, high, wide).squeeze_(0)
        index = torch.empty_like(out, dtype=torch.uint8)
        pool_forward[(triton.cdiv(out.numel(), 1024),)](
            x, out, index, out.numel(), *x.stride(), C=c, OH=high, OW=wide, KH=kh, KW=kw, BLOCK=1024
        )
        ctx.save_for_backward(index)
        ctx.shape, ctx.kernel = x.shape, kernel
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        (b, c, h, w), (kh, kw) = ctx.shape, ctx.kernel
        out = g.new_empty((b, h, w, c))
        pool_backward[(triton.cdiv(out.numel(), 1024),)](
            g, index, out, out.numel(), *g.stride(), C=c, H=h, W=w, OH=h // kh, OW=w // kw, KH=kh, KW=kw, BLOCK=1024
        )
        return out.permute(0, 3, 1, 2), None


# ---- cross-entropy ------------------------------------------------------------------------------
@triton.jit
def entropy_forward(scores, target, loss, slope, IGNORED: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
                    BB: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """One client's mean loss over its batch, and the gradient of its scores."""
    n = tl.program_id(0).to(tl.int64)
    b, c = tl.arange(0, BB), tl.arange(0, BC)
    valid = (b[:, None] < B) & (c[None, :] < C)
    at = n * (B * C) + b[:, None] * C + c[None, :]
    z = tl.load(scores + at, mask=valid, other=float("-inf")).to(tl.float32)
    z = tl.where(b[:, None] < B, z, 0.0)
    y = tl.load(target + n * B + b, mask=b < B, other=0)
    z = z - tl.max(z, axis=1)[:, None]
    total = tl.sum(tl.exp(z), axis=1)
    hit = (c[None, :] == y[:, None]) & valid
    each = tl.log(total) - tl.sum(tl.where(hit, z, 0.0), axis=1)
    counted = ((b < B) & (y != IGNORED)).to(tl.float32)
    share = counted / tl.sum(counted, axis=0)
    each = tl.where(counted > 0.0, each, 0.0)  # it may be no number
    tl.store(loss + n, tl.sum(each * share, axis=0))
    tl.store(slope + at, (tl.exp(z) / total[:, None] - tl.where(hit, 1.0, 0.0)) * share[:, None], mask=valid)


class Entropy(torch.autograd.Function):
    """Mean cross-entropy of `scores [n, b, classes]` against `target [n, b]`, per client."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor, ignored: int) -> Tensor:
        n, b, c = scores.shape
        scores, target = scores.contiguous(), target.contiguous()
        loss = torch.empty(n, dtype=torch.float32, device=scores.device)
        slope = torch.empty_like(scores)
        tile = {"BB": triton.next_power_of_2(b), "BC": triton.next_power_of_2(c)}
        entropy_forward[(n,)](scores, target, loss, slope, IGNORED=ignored, B=b, C=c, **tile)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope * g[:, None, None], None, None


# ---- the step -----------------------------------------------------------------------------------
@triton.jit
def descend_rows(y, lr, g, c, out, d, yn, gn, cn, on, CORRECTED: tl.constexpr, BLOCK: tl.constexpr):
    """out = y - lr (g + c), a rate for each row."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.load(lr + n)
    way = tl.load(g + n * gn + at, mask=at < d)
    if CORRECTED:
        way += tl.load(c + n * cn + at, mask=at < d)
    moved = tl.load(y + n * yn + at, mask=at < d) - rate * way
    tl.store(out + n * on + at, moved, mask=at < d)


def descend(y: Tensor, lr: Tensor, g: Tensor, c: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`y - lr (g + c)` of `[n, d]` with `lr [n]`, in one pass over memory; `out` may be y itself."""
    out = y.new_empty(y.shape) if out is None else out
    grid = (triton.cdiv(y.shape[1], 2048), len(y))
    way = (g, g if c is None else c)
    strides = (y.stride(0), *(t.stride(0) for t in way), out.stride(0))
    descend_rows[grid](y, lr.contiguous(), *way, out, y.shape[1], *strides, c is not None, BLOCK=2048, num_warps=8)
    return out


# ---- chance -------------------------------------------------------------------------------------
@triton.jit
def scatter(key, word):
    """`keys.scatter` on unsigned 64-bit words, whose shifts need no masks."""
    x = key + (word + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    return (x ^ (x >> 27)) * 0x94D049BB133111EB


@triton.jit
def fold(key, word):
    """`keys.fold` on unsigned words."""
    x = scatter(key, word)
    return x ^ (x >> 31)


@triton.jit
def draw_rows(order, start, size, client, key, begin, rows, noise, slots, WIDTH: tl.constexpr, SHUFFLE: tl.constexpr,
              ROUNDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """`Samples.rows` and the keys of the steps, for one job."""
    n = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    who, root = tl.load(client + n), tl.load(key + n).to(tl.uint64)
    many, first_step = tl.load(size + who), tl.load(begin)
    slot = first_step * WIDTH + at
    if SHUFFLE:
        place = slot % many
        lap = fold(root, (slot // many).to(tl.uint64))
        for number in range(ROUNDS):
            once = fold(lap, tl.full((BLOCK,), number, tl.uint64))
            partner = (((once >> 32) * many.to(tl.uint64) >> 32).to(tl.int64) - place + many) % many
            coin = (scatter(once, tl.maximum(place, partner).to(tl.uint64)) >> 32) & 1
            place = tl.where(coin == 1, partner, place)
    else:
        place = ((scatter(root, slot.to(tl.uint64)) >> 32) * many.to(tl.uint64) >> 32).to(tl.int64)
    row = tl.load(order + tl.load(start + who) + place, mask=at < slots, other=0)
    step = at // WIDTH
    jobs = tl.num_programs(1)
    tl.store(rows + (step * jobs + n) * WIDTH + at % WIDTH, row, mask=at < slots)
    word = fold(fold(root, -1), (first_step + step).to(tl.uint64))
    tl.store(noise + step * jobs + n, word.to(tl.int64), mask=(at < slots) & (at % WIDTH == 0))


def draw(
    order: Tensor, start: Tensor, size: Tensor, client: Tensor, key: Tensor, begin: Tensor, count: int, width: int,
    rounds: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows `[count, n, width]` and keys `[count, n]` of n jobs' steps; `rounds` of the permutation, 0 for none."""
    n = len(client)
    rows, noise = client.new_empty((count, n, width)), client.new_empty((count, n))
    draw_rows[(triton.cdiv(count * width, 128), n)](
        order, start, size, client, key, begin, rows, noise, count * width, WIDTH=width, SHUFFLE=rounds > 0,
        ROUNDS=rounds, BLOCK=128,
    )  # fmt: skip
    return rows, noise


@triton.jit
def drop(x, key, out, each, limit, scale, sn, sb, sc, sh, sw, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """out = x * scale where the keyed word of the place is at least `limit`, else 0; out is in plain order."""
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = scatter(tl.load(key + n).to(tl.uint64), at.to(tl.uint64)) >> 32
    where = n * sn + at // (C * H * W) * sb + at // (H * W) % C * sc + at // W % H * sh + at % W * sw
    value = tl.load(x + where, mask=at < each, other=0.0)
    kept = word >= limit.to(tl.uint64)
    tl.store(out + n * each + at, tl.where(kept, value * scale, 0.0), mask=at < each)


def dropped(x: Tensor, key: Tensor, limit: int, p: float) -> Tensor:
    """`x [n, ...]` with each client's places whose keyed word is below the limit set to 0, the others over 1 - p."""
    out, each = torch.empty_like(x, memory_format=torch.contiguous_format), x[0].numel()
    image = x if x.dim() == 5 else x.reshape(len(x), 1, 1, 1, -1)
    drop[(triton.cdiv(each, 1024), len(x))](
        image, key, out, each, limit, 1.0 / (1.0 - p), *image.stride(), C=image.shape[2], H=image.shape[3],
        W=image.shape[4], BLOCK=1024,
    )  # fmt: skip
    return out


class Dropout(torch.autograd.Function):
    """Nothing but the key is kept: the gradient is dropped at the same places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, limit: int, p: float) -> Tensor:
        ctx.save_for_backward(key)
        ctx.limit, ctx.p = limit, p
        return dropped(x, key, limit, p)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (key,) = ctx.saved_tensors
        return dropped(g, key, ctx.limit, ctx.p), None, None, None
