"""Where the gradients of the clients' parameters belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Places:
    """Where the gradients of the clients' parameters belong: a layer may write its own there, sparing a copy.

    A place belongs to the parameter itself, the very tensor: the gradient of a view of it, even one of the same form
    and memory, still has to pass through what made the view.
    """

    def __init__(self, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        self.parameters, self.places = parameters, places
        self.open = {id(p): place for p, place in zip(parameters, places, strict=True)}

    def take(self, parameter: Tensor | None) -> Tensor | None:
        """The place of a parameter, once; None for what is no parameter, or was taken by another layer."""
        return self.open.pop(id(parameter), None)

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Put down the gradients that no layer wrote itself."""
        for p, place, gradient in zip(self.parameters, self.places, gradients, strict=True):
            if id(p) in self.open:
                place.zero_() if gradient is None else place.copy_(gradient)
            elif gradient is not None:  # of a further use of the parameter
                place.add_(gradient)


def into(place: Tensor | None, make: Callable[[Tensor | None], Tensor]) -> Tensor | None:
    """Make a gradient in its place, and have nothing to hand on; or hand it on."""
    made = make(place)
    return made if place is None else None


def pair(value: Any) -> tuple[int, int]:
    """One number for both sides, or one for each."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def rounded(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product in the number type that autocasting asks for."""
    kind = torch.get_autocast_dtype(x.device.type)
    return x.to(kind), w.to(kind), None if bias is None else bias.to(kind)
