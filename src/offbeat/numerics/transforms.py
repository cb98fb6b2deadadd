"""Transforms of `torch.func` that are at work: the engine's client axis, and those of a model's own inside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,
    get_interpreter_stack,
    is_batchedtensor,
    peek_interpreter_stack,
)

FACTORIES: set[Any] = {
    *(torch.zeros, torch.ones, torch.empty, torch.full),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
    *(torch.tensor, torch.arange, torch.eye, torch.clone, Tensor.clone, Tensor.repeat),
}  # functions that make a tensor which a model may write into
IN_PLACE = ("is not possible because there exists a Tensor", "doesn't match the broadcast shape")  # PyTorch's words


def level() -> int:
    """How many transforms are at work."""
    inner = peek_interpreter_stack()
    return 0 if inner is None else inner.level()


class Axis(NamedTuple):
    """An axis that `vmap` has added."""

    level: int
    size: int
    randomness: str  # of draws: "different" for each row, the "same", or an "error"

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor `[size, ...]` as one whose first axis is this one."""
        return _add_batch_dim(tensor, 0, self.level)

    def each(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor for each row."""
        copies = tensor.expand(self.size, *tensor.shape).clone(memory_format=torch.contiguous_format)
        return self.rows(copies)


def axes_inside(outer: int) -> list[Axis]:
    """Those that were added since so many transforms were at work."""
    axes = []
    for each in get_interpreter_stack() or ():  # the pointer below does not keep it
        if each.level() > outer and each.key() == TransformType.Vmap:
            axis = CVmapInterpreterPtr(each)
            axes.append(Axis(each.level(), axis.batchSize(), axis.randomness().name.lower()))
    return axes


class Widened(RuntimeError):
    """A model writes what differs between clients into a tensor that it made for all of them: call it once more."""


class Fresh:
    """Tensors that a model makes while it is called, by number. One that all clients would share gets a row for each of
    them, after something was to be written into it that is not the same for all; `wide` remembers which."""

    def __init__(self, wide: set[int]) -> None:
        self.wide = wide
        self.shared: dict[int, tuple[int, Tensor]] = {}  # by the tensor's id, which lasts as long as it is held here
        self.count = 0

    def note(self, tensor: Tensor, axis: Axis) -> Tensor:
        self.count += 1
        if self.count in self.wide:
            return axis.each(tensor)
        if not is_batchedtensor(tensor):
            self.shared[id(tensor)] = (self.count, tensor)
        return tensor

    def widen(self, target: Tensor) -> bool:
        """Whether the tensor that was to be changed, or of which it is a part, can have rows the next time."""
        whole = target if target._base is None else target._base
        number, _ = self.shared.get(id(whole), (None, None))
        if number is not None:
            self.wide.add(number)
        return number is not None


def writes(func: Any) -> bool:
    """Whether a function changes its first argument, by PyTorch's own naming."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
