"""Cross-entropies and likelihoods of n clients in few operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.numerics.draws import ForOne, compiled, first
from offbeat.numerics.fast.places import Places

IGNORED = -100  # PyTorch's mark of a target that does not count
PLAIN: dict[str, Any] = {
    "weight": None, "size_average": None, "ignore_index": IGNORED, "reduce": None, "reduction": "mean",
    "label_smoothing": 0.0,
}  # fmt: skip


def cross_entropy(places: Places | None, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The mean over a batch against class numbers."""
    kwargs = {name: value for name, value in kwargs.items() if PLAIN.get(name, NotImplemented) != value}
    if args or kwargs or input.dim() != 2 or target.shape != input.shape[:1] or target.dtype != torch.int64:
        return NotImplemented
    scores = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    return Entropy.apply(scores, target)  # type: ignore[no-untyped-call]


def smoothed(
    places: Places | None, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = IGNORED, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """The mean against class numbers, with weights of classes and with smoothing: a share of every class."""
    usual = size_average is None and reduce is None and reduction == "mean" and target.dtype == torch.int64
    if weight is None or not label_smoothing or not usual or input.dim() != target.dim() + 1:
        return NotImplemented
    logs, target = input.movedim(1, -1).flatten(0, -2).log_softmax(1), target.flatten()
    ignored = target == ignore_index
    place = torch.where(ignored, 0, target)
    counted = weight[place].masked_fill(ignored, 0.0)
    right = logs.gather(1, place[:, None])[:, 0].masked_fill(ignored, 0.0) * counted
    every = (logs * weight).sum(1).masked_fill(ignored, 0.0) / logs.shape[1]
    return -((1 - label_smoothing) * right + label_smoothing * every).sum() / counted.sum()


def gaussian(
    places: Places | None, input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """The mean over a batch; a negative variance, of which PyTorch raises an error, gives no number."""
    if reduction != "mean" or not isinstance(var, Tensor) or not input.shape == target.shape == var.shape:
        return NotImplemented
    held = var + (var.detach().clamp(min=eps) - var.detach())  # clamped, with the gradient of what it was
    loss = 0.5 * (held.log() + (input - target).square() / held)
    loss = loss.mean() + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return torch.where((var < 0).any(), math.nan, loss)


class Entropy(ForOne):
    @staticmethod
    def forward(scores: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(scores, target)

    @staticmethod
    def vmap(info: Any, dims: Any, scores: Tensor, target: Tensor) -> Any:
        scores, target = (first(t, d, info.batch_size) for t, d in zip((scores, target), dims, strict=True))
        if scores.is_cuda and scores.dtype == torch.float32 and scores[0].numel() <= 8192 and compiled():
            from offbeat.numerics.fast import kernels

            return kernels.Entropy.apply(scores, target, IGNORED), 0  # type: ignore[no-untyped-call]
        return EntropyOfAll.apply(scores, target), 0  # type: ignore[no-untyped-call]


class EntropyOfAll(torch.autograd.Function):
    """Mean cross-entropies `[n]` of `scores [n, b, classes]` against `target [n, b]`, in few operations."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor) -> Tensor:
        logs = torch.log_softmax(scores, dim=2)
        ignored = target == IGNORED
        place = torch.where(ignored, 0, target)[:, :, None]  # a wrong class number is an error
        counted = (~ignored).to(scores.dtype)
        share = (counted / counted.sum(1, keepdim=True))[:, :, None]
        ctx.save_for_backward(logs, place, share)
        picked = logs.gather(2, place).masked_fill(ignored[:, :, None], 0.0)  # it may be infinite
        return (picked * share).sum((1, 2)).neg_()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        logs, place, share = ctx.saved_tensors
        weight = share * g[:, None, None]
        return (logs.exp() * weight).scatter_add_(2, place, weight.neg()), None
