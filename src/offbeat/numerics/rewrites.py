"""Calls of PyTorch in another form, with the same numbers: what flat vectors or a client axis do not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def dense(place: int) -> Callable[..., Call]:
    """A gradient is a flat vector; `sparse` stands at this place among the arguments."""

    def rewrite(*args: Any, **kwargs: Any) -> Call:
        if len(args) > place:
            args = (*args[:place], False, *args[place + 1 :])
        return args, {**kwargs, "sparse": False} if "sparse" in kwargs else kwargs

    return rewrite


def of_whole_numbers(input: Tensor, target: Any, *args: Any, **kwargs: Any) -> Call:
    """Classes may be bytes, but not where they are looked up for many clients."""
    target = target.long() if isinstance(target, Tensor) and target.dtype == torch.uint8 else target
    return (input, target, *args), kwargs


def aligned(input: Tensor) -> Call:
    """Parts of a flat vector begin anywhere; pairs of numbers that are to be complex must not: they are copied."""
    return (input.clone(memory_format=torch.contiguous_format),), {}


REWRITES: dict[Any, Callable[..., Call]] = {
    functional.embedding: dense(6),
    functional.embedding_bag: dense(7),
    functional.cross_entropy: of_whole_numbers,
    functional.nll_loss: of_whole_numbers,
    torch.view_as_complex: aligned,
}
