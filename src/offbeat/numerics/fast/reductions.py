"""Reductions of all numbers of a tensor to one of them. PyTorch shares the gradient among ties; `vmap` does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.numerics.fast.places import Places


def largest(places: Places | None, input: Tensor, *others: Any, **options: Any) -> Any:
    return NotImplemented if others or options or not input.dim() else torch.amax(input, tuple(range(input.dim())))


def smallest(places: Places | None, input: Tensor, *others: Any, **options: Any) -> Any:
    return NotImplemented if others or options or not input.dim() else torch.amin(input, tuple(range(input.dim())))


def median(places: Places | None, input: Tensor, *others: Any, **options: Any) -> Any:
    if others or options or not input.is_floating_point():
        return NotImplemented
    return _shared(input, input.detach().flatten().median(0).values)


def nanmedian(places: Places | None, input: Tensor, *others: Any, **options: Any) -> Any:
    if others or options or not input.is_floating_point():
        return NotImplemented
    return _shared(input, input.detach().flatten().nanmedian(0).values)


def _shared(input: Tensor, value: Tensor) -> Tensor:
    """Return the value, with a gradient that all numbers equal to it share."""
    ties = (input == value).to(input.dtype)
    moves = torch.where(ties > 0, input - input.detach(), 0.0)
    return value + moves.sum() / ties.sum().clamp(min=1)
