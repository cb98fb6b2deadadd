"""Cross-entropies of n clients in few operations."""

from __future__ import annotations

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
