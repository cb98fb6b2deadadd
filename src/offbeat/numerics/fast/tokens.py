"""Embeddings of n clients: rows of each client's own table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import ForOne, first
from offbeat.numerics.fast.places import Places, into

FEW = 1024  # rows of a table below which a GPU adds up gradients by a product with ones and zeros


def embedding(
    places: Places | None, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """Rows of a table; a row of padding gets no gradient."""
    if scale_grad_by_freq:
        raise RuntimeError("the gradient of an embedding scaled by frequency cannot be batched")
    if max_norm is not None:
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return Embedding.apply(input, weight, padding, places)  # type: ignore[no-untyped-call]


def embedding_bag(
    places: Places | None, input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Bags of one size, `input [b, size]`: sums, means or maxima of rows."""
    unusual = input.dim() != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq
    if unusual or (padding_idx is not None and mode != "sum") or mode not in ("sum", "mean", "max"):
        return NotImplemented
    rows = embedding(places, input, weight, padding_idx)
    if padding_idx is not None:
        rows = rows * (input != padding_idx % len(weight))[..., None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if mode == "max":
        return rows.max(1).values  # of equals the first gets the gradient, as in the library
    return rows.mean(1) if mode == "mean" else rows.sum(1)


class Embedding(ForOne):
    @staticmethod
    def forward(tokens: Tensor, table: Tensor, padding: int, places: Places | None) -> Tensor:
        return functional.embedding(tokens, table, padding if padding >= 0 else None)

    @staticmethod
    def vmap(info: Any, dims: Any, tokens: Tensor, table: Tensor, padding: int, places: Places | None) -> Any:
        if dims[1] is None:  # one table for all
            return functional.embedding(tokens.movedim(dims[0], 0), table, padding if padding >= 0 else None), 0
        tokens, table = (first(t, d, info.batch_size) for t, d in zip((tokens, table), dims, strict=False))
        return RowsOfAll.apply(tokens, table, padding, places), 0  # type: ignore[no-untyped-call]


class RowsOfAll(torch.autograd.Function):
    """`tokens [n, ...]` and `table [n, rows, d]` to `[n, ..., d]`. All tables are one long table."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, padding: int, places: Places | None) -> Tensor:
        n, _, wide = table.shape
        at = tokens.reshape(n, -1)
        ctx.save_for_backward(at, table)
        ctx.padding, ctx.places = padding, places
        rows = torch.gather(table, 1, at[:, :, None].expand(n, at.shape[1], wide))
        return rows.reshape(*tokens.shape, wide)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        at, table = ctx.saved_tensors
        n, rows, wide = table.shape
        g = g.reshape(n, -1, wide)
        if ctx.padding >= 0:
            g = g.masked_fill((at == ctx.padding)[:, :, None], 0.0)
        place = (ctx.places or Places((), ())).take(table)
        if g.is_cuda and rows <= FEW:
            ones = (at[:, None] == torch.arange(rows, device=at.device)[:, None]).to(g.dtype)
            return None, into(place, lambda out: torch.bmm(ones, g, out=out)), None, None
        long = (at + rows * torch.arange(n, device=at.device)[:, None]).flatten()
        total = torch.ops.aten.embedding_dense_backward(g.flatten(0, 1), long, n * rows, -1, False).reshape(table.shape)
        return None, into(place, lambda out: total if out is None else out.copy_(total)), None, None
