"""Dense layers of n clients: batched products, gradients straight into their places; and the local step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import ForOne, compiled, first
from offbeat.numerics.fast.places import Places, into, rounded


def linear(places: Places | None, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    plain = input.dim() >= 2 and weight.dim() == 2 and not (input.is_complex() or weight.is_complex())
    if not plain or (bias is not None and bias.shape != weight.shape[:1]):
        return NotImplemented
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = rounded(input, weight, bias)
    return Linear.apply(input, weight, bias, places)  # type: ignore[no-untyped-call]


class Linear(ForOne):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, places: Places | None) -> Tensor:
        return functional.linear(x, w, bias)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, places: Places | None) -> Any:
        n = info.batch_size
        x = first(x, dims[0], n)
        if dims[1] is None and (bias is None or dims[2] is None):  # one layer for all clients
            return functional.linear(x, w, bias), 0
        w, bias = first(w, dims[1], n), None if bias is None else first(bias, dims[2], n)
        out: Tensor = LinearOfAll.apply(x.flatten(1, -2), w, bias, places)  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], -1), 0


class LinearOfAll(torch.autograd.Function):
    """`x [n, b, i]`, `w [n, o, i]` and `bias [n, o]` to `[n, b, o]`: batched products both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, places: Places | None) -> Tensor:
        ctx.save_for_backward(x, w, bias)
        ctx.places = places
        return torch.bmm(x, w.mT) if bias is None else torch.baddbmm(bias[:, None], x, w.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, bias = ctx.saved_tensors
        places = ctx.places or Places((), ())
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            gx = torch.bmm(g, w)
        if ctx.needs_input_grad[1]:
            gw = places.product(w, g, x)
        if ctx.needs_input_grad[2]:
            gb = into(places.take(bias), lambda out: torch.sum(g, 1, out=out))
        return gx, gw, gb, None


class Descend(ForOne):
    """`y - lr (g + c)` with a rate of each client's own; c may be missing."""

    @staticmethod
    def forward(y: Tensor, lr: Tensor, g: Tensor, c: Tensor | None) -> Tensor:
        return torch.addcmul(y, lr, g if c is None else g + c, value=-1)

    @staticmethod
    def vmap(info: Any, dims: Any, y: Tensor, lr: Tensor, g: Tensor, c: Tensor | None) -> Any:
        y, lr, g = (first(t, d, info.batch_size) for t, d in zip((y, lr, g), dims[:3], strict=True))
        c = None if c is None else first(c, dims[3], info.batch_size)
        lines = all(t.stride(-1) == 1 for t in (y, g, c) if t is not None)
        if y.is_cuda and y.dim() == 2 and lines and compiled():
            from offbeat.numerics.fast import kernels

            return kernels.descend(y, lr, g, c), 0
        g = g if c is None else g + c
        return torch.addcmul(y, lr.reshape(-1, *[1] * (y.dim() - 1)), g, value=-1), 0


def move(y: Tensor, lr: Tensor, g: Tensor, c: Tensor | None = None) -> None:
    """`y <- y - lr (g + c)` of `[n, d]` with `lr [n]`, in its place."""
    if y.is_cuda and compiled():
        from offbeat.numerics.fast import kernels

        kernels.descend(y, lr, g, c, y)
    else:
        y.addcmul_(lr[:, None], g if c is None else g + c, value=-1)
