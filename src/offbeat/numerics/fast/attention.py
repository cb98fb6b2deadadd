"""Attention of n clients: it has no weights of its own, so the clients are a larger batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import ForOne, compiled, first
from offbeat.numerics.fast.places import Places

SHORT = 512  # positions up to which a GPU holds all weights of attention at once
LONGEST, WIDEST, MOST = 128, 64, 4096  # positions, numbers of a head, and both, that our own kernel holds anywhere


def attention(
    places: Places | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Scaled dot-product attention of any shape and mask; with dropout it is in `numerics/draws.py`."""
    if dropout_p or query.dim() < 2:
        return NotImplemented
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    return Attention.apply(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]


class Attention(ForOne):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    @staticmethod
    def vmap(
        info: Any, dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Any:
        n = info.batch_size
        q, k, v = (first(t, d, n) for t, d in zip((q, k, v), dims, strict=False))
        if mask is None and short(q, k, v):
            from offbeat.numerics.fast.attention_kernels import Attend

            return Attend.apply(q, k, v, causal, scale_of(q, scale)), 0  # type: ignore[no-untyped-call]
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])  # type: ignore[no-untyped-call]
        q, k, v = (t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (q, k, v))
        mask = None if mask is None else folded(mask, dims[3], n, lead)
        if q.is_cuda and max(q.shape[-2], k.shape[-2]) <= SHORT:
            out = by_products(q, k, v, mask, causal, scale)
        else:
            q, k, v = q[:, None], k[:, None], v[:, None]
            mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
            out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
        return out.reshape(*lead, *out.shape[-2:]), 0


def short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a kernel of our own takes them: heads of batches, as models have them."""
    if not q.is_cuda or q.dtype != torch.float32 or not compiled() or not q.dim() == k.dim() == v.dim() == 5:
        return False
    alike = q.shape[:3] == k.shape[:3] == v.shape[:3] and q.shape[4] == v.shape[4]
    long, wide = (max(16, 1 << (side - 1).bit_length()) for side in (k.shape[3], q.shape[4]))
    return alike and q.shape[3] <= LONGEST >= long and wide <= WIDEST and long * wide <= MOST


def scale_of(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def folded(mask: Tensor, dim: int | None, n: int, lead: torch.Size) -> Tensor:
    """A mask for all matrices `[T, S]`, or one for each of them `[m, T, S]`."""
    if dim is None and mask.dim() == 2:
        return mask
    if dim is not None:
        mask = mask.movedim(dim, 0)
        mask = mask.reshape(n, *[1] * (len(lead) + 2 - mask.dim()), *mask.shape[1:])
    return mask.expand(*lead, *mask.shape[-2:]).reshape(-1, *mask.shape[-2:])


def by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """The plain formula, whose gradient is made in a fixed order, unlike those of the library's fused kernels."""
    by = scale_of(q, scale)
    hides = mask is not None
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    mask = None if mask is None else mask.to(q.dtype)  # products may be rounded
    out: Tensor = Weighted.apply(q, k, v, mask, by, hides)  # type: ignore[no-untyped-call]
    return out


class Weighted(torch.autograd.Function):
    """`softmax(scale q k^T + mask) v` of matrices `[m, ..., d]`; a query from which the mask hides all gets zeros."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, hides: bool) -> Tensor:
        if mask is None:
            scores = torch.bmm(q * scale, k.mT)
        else:
            scores = torch.baddbmm(mask if mask.dim() == 3 else mask[None], q, k.mT, alpha=scale)
        weights = torch.softmax(scores, dim=-1)
        if hides:
            weights = weights.masked_fill_(scores.isneginf().all(-1, keepdim=True), 0.0)
        ctx.shared = mask is not None and mask.dim() == 2
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, weights)
        return torch.bmm(weights, v)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, weights = ctx.saved_tensors
        slope = torch._softmax_backward_data(torch.bmm(g, v.mT), weights, -1, weights.dtype)
        gq = torch.bmm(slope, k).mul_(ctx.scale)
        gk = torch.bmm(slope.mT, q).mul_(ctx.scale)
        gm = None if not ctx.needs_input_grad[3] else slope.sum(0) if ctx.shared else slope
        return gq, gk, torch.bmm(weights.mT, g), gm, None, None
