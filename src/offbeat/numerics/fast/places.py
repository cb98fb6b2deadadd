"""Where the gradients of the clients' parameters belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.numerics.draws import ForOne


class Places:
    """A layer may write its gradient straight into its place, sparing a copy.

    A place belongs to the parameter itself, the very tensor: the gradient of a view of it, even one of the same form
    and memory, still has to pass through what made the view. With `steps` the gradients of large matrices are not made
    at all: their factors are kept, so that a local step can take their product straight into the model. On a processor
    other large ones that are handed on are kept as they are, instead of being copied.
    """

    def __init__(self, parameters: Sequence[Tensor], places: Sequence[Tensor], steps: bool = False) -> None:
        self.parameters, self.places, self.steps = parameters, places, steps
        self.open = {id(p): place for p, place in zip(parameters, places, strict=True)}
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}
        self.kept: dict[int, Tensor] = {}

    def take(self, parameter: Tensor | None) -> Tensor | None:
        """The place of a parameter, once; None for what is no parameter, or was taken by another layer."""
        return self.open.pop(id(parameter), None)

    def product(self, w: Tensor, g: Tensor, x: Tensor) -> Tensor | None:
        """The gradient g^T x of a matrix: in its place, or kept as factors, or handed on."""
        size = w[0].numel()
        if self.steps and size >= (LARGE if w.is_cuda else LEAST) and self.take(w) is not None:
            self.factors[id(w)] = (owned(g, w), owned(x, w))
            return None
        small = not w.is_cuda and size < SMALL
        return into(None if small else self.take(w), lambda out: torch.bmm(g.mT, x, out=out))

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Put down the gradients that no layer wrote itself."""
        for p, place, gradient in zip(self.parameters, self.places, gradients, strict=True):
            if id(p) in self.open:
                if gradient is None:
                    place.zero_()
                elif self.steps and not p.is_cuda and p[0].numel() >= SMALL and not shared(p, gradient):
                    self.kept[id(p)] = gradient
                else:
                    place.copy_(gradient)
            elif gradient is not None:  # of a further use of the parameter
                if id(p) in self.factors:
                    g, x = self.factors.pop(id(p))
                    torch.bmm(g.mT, x, out=place)
                place.add_(gradient)


LEAST = 1 << 12  # numbers in a matrix from which a CPU gains by a step of its own
SMALL = 1 << 15  # numbers in a matrix below which a CPU makes many together faster than each in its place
LARGE = 1 << 17  # numbers in a matrix from which a GPU gains by a step of its own


def into(place: Tensor | None, make: Callable[[Tensor | None], Tensor]) -> Tensor | None:
    """Make a gradient in its place, and have nothing to hand on; or hand it on."""
    made = make(place)
    return made if place is None else None


def owned(t: Tensor, w: Tensor) -> Tensor:
    """Return a tensor to keep while the models move, a copy if it is a part of them; without its history, which would
    hold the layer that holds this."""
    return t.detach().clone() if shared(t, w) else t.detach()


def shared(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory: a gradient that is a part of the models would move with them."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def pair(value: Any) -> tuple[int, int]:
    """One number for both sides, or one for each."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def rounded(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a product in the number type that autocasting asks for; it leaves doubles alone."""
    kind = torch.get_autocast_dtype(x.device.type)

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype == torch.float64 else t.to(kind)

    return cast(x), cast(w), None if bias is None else cast(bias)


class Apart(ForOne):
    """`op(*tensors)` of one client after the other: on a processor the library's own kernels, each client alone, are
    quicker than what the client axis makes of them, where a client has enough to do."""

    @staticmethod
    def forward(op: Any, *tensors: Tensor | None) -> Any:
        return op(*tensors)

    @staticmethod
    def vmap(info: Any, dims: Any, op: Any, *tensors: Tensor | None) -> Any:
        n = info.batch_size
        each = [[t] * n if t is None or dim is None else parted(t.movedim(dim, 0))
                for t, dim in zip(tensors, dims[1:], strict=True)]  # fmt: skip
        outs = [op(*own) for own in zip(*each, strict=True)]
        if isinstance(outs[0], tuple):
            return tuple(joined(parts) for parts in zip(*outs, strict=True)), (0,) * len(outs[0])
        return joined(outs), 0


def parted(t: Tensor) -> Sequence[Tensor]:
    """The rows. Of one alone the gradient is a view as well; `unbind` would copy it."""
    return [t.squeeze(0)] if len(t) == 1 else t.unbind()


def joined(outs: Sequence[Tensor]) -> Tensor:
    return outs[0][None] if len(outs) == 1 else torch.stack(list(outs))


HEAVY = 1 << 13  # numbers of one client that are worth a call of their own on a processor
