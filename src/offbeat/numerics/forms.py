"""Samples of several parts (tuples, dictionaries) as one tensor of bytes, and back: a batch of them is one gather."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.numerics.windows import Windows

Tree: TypeAlias = Any  # a tensor [samples, ...], windows of a stream, or tuples and dictionaries of tensors


class Form(NamedTuple):
    """What a sample of several parts looks like."""

    spec: Any  # how the parts lie in tuples and dictionaries
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(tree: Tree, dtype: torch.dtype) -> Form | None:
        """The form of samples whose real numbers are of this type; None for a tensor alone, which needs none."""
        if isinstance(tree, Tensor | Windows):
            return None
        leaves, spec = pytree.tree_flatten(tree)
        kinds = tuple(dtype if leaf.is_floating_point() else leaf.dtype for leaf in leaves)
        return Form(spec, tuple(tuple(leaf.shape[1:]) for leaf in leaves), kinds)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [math.prod(shape) * kind.itemsize for shape, kind in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def tokens(self) -> int:
        """Whole numbers in a sample, of parts that have several."""
        parts = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) for shape, kind in parts if shape and not kind.is_floating_point)

    def pack(self, tree: Tree) -> Tensor:
        """`[n, bytes]`."""
        leaves = zip(pytree.tree_leaves(tree), self.dtypes, self.sizes, strict=True)
        return torch.cat(
            [leaf.to(kind).contiguous().flatten().view(torch.uint8).reshape(len(leaf), size)
             for leaf, kind, size in leaves], dim=1,
        )  # fmt: skip

    def unpack(self, packed: Tensor) -> Tree:
        """The parts, each `[..., *shape]`, of bytes `[..., bytes]`."""
        parts = zip(torch.split(packed, self.sizes, dim=-1), self.shapes, self.dtypes, strict=True)
        lead = packed.shape[:-1]
        leaves = [
            part.clone(memory_format=torch.contiguous_format).view(kind).reshape(*lead, *shape)
            if part.shape[-1]
            else part.new_empty((*lead, *shape), dtype=kind)
            for part, shape, kind in parts
        ]
        return pytree.tree_unflatten(leaves, self.spec)


class Forms(NamedTuple):
    """Of inputs and of targets."""

    inputs: Form | None = None
    targets: Form | None = None


def packed(form: Form | None, tree: Tree, dtype: torch.dtype) -> Tensor | Windows:
    """Samples as the engine holds them: one tensor, or windows of a stream."""
    if form is not None:
        return form.pack(tree)
    return tree.to(dtype) if tree.is_floating_point() else tree  # type: ignore[no-any-return]


def unpacked(form: Form | None, values: Tensor) -> Tree:
    return values if form is None else form.unpack(values)


def wider(form: Form | None, dtype: torch.dtype) -> Form | None:
    """Return the form of the same samples with real numbers of this type."""
    if form is None:
        return None
    return form._replace(dtypes=tuple(dtype if kind.is_floating_point else kind for kind in form.dtypes))


def double(tree: Tree) -> Tree:
    """Return the same parts with real numbers in float64."""
    return pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def rows_of(values: Tree, rows: Any) -> Tree:
    """Some rows of every part."""
    if isinstance(values, Tensor | Windows):
        return values[rows]
    return pytree.tree_map(lambda leaf: leaf[rows], values)


def arguments(inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with a batch: a tuple is its arguments, a dictionary is its arguments by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def called(model: nn.Module | Callable[..., Any], inputs: Tree) -> Any:
    return scores_in(handed_over(model, inputs))


def handed_over(model: nn.Module | Callable[..., Any], inputs: Tree) -> Any:
    """All that a model gives."""
    given, named = arguments(inputs)
    return model(*given, **named)


class Whole(NamedTuple):
    """A record with `logits` of which the loss takes more than these."""

    record: Any


def handing_over(model: nn.Module) -> nn.Module:
    """The model itself, which from now on gives its records whole."""
    model.register_forward_hook(as_whole)
    return model


def as_whole(model: nn.Module, given: Any, record: Any) -> Whole:
    return Whole(record)


def scores_in(outputs: Any) -> Any:
    """A model's outputs; where they are a record or a dictionary with `logits`, these, or the whole of it for a loss
    that takes that."""
    if isinstance(outputs, Whole):
        return outputs.record
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return outputs if isinstance(outputs, Tensor | tuple) else getattr(outputs, "logits", outputs)
