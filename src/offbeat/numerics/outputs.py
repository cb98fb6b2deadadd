"""Outputs and targets of any form: tensors, or tuples, dictionaries and dataclasses of them, with what has no rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.errors import ConfigError


def mapped(of: Callable[..., Any], *values: Any) -> Any:
    """`of` the parts of values of one form, in the same form."""

    def each(first: Any, *others: Any) -> Any:
        if not is_dataclass(first) or isinstance(first, type):
            return of(first, *others)
        made = copy.copy(first)
        put = object.__setattr__ if first.__dataclass_params__.frozen else setattr  # type: ignore[attr-defined]
        for field in fields(first):
            put(made, field.name, mapped(of, *(getattr(value, field.name) for value in (first, *others))))
        return made

    return pytree.tree_map(each, *values)


def parts(values: Any) -> list[Any]:
    leaves: list[Any] = []
    mapped(leaves.append, values)
    return leaves


def cloned(values: Any) -> Any:
    return mapped(lambda part: part.clone() if isinstance(part, Tensor) else part, values)


def detached(values: Any) -> Any:
    return mapped(lambda part: part.detach() if isinstance(part, Tensor) else part, values)


def has_rows(part: Any, rows: int) -> bool:
    """Whether a part has a row for each sample; None, numbers and texts have none."""
    if isinstance(part, Tensor):
        return part.dim() > 0 and len(part) == rows
    if part is not None and not isinstance(part, bool | int | float | str):
        raise ConfigError(
            [f"the model's outputs have a {type(part).__name__}, whose rows cannot be told; for a metric over a large "
             "set, or for sets of single clients, give tensors, or tuples, dictionaries or dataclasses of tensors"]
        )  # fmt: skip
    return False


def in_rows(values: Any, rows: int) -> bool:
    """Return whether every part that may depend on the samples has a row for each of them."""
    for part in parts(values):
        if isinstance(part, Tensor):
            if not has_rows(part, rows):
                return False
        elif not (part is None or isinstance(part, bool | str)):
            return False
    return True


def cut(values: Any, begin: int, end: int, rows: int) -> Any:
    """Samples `begin .. end` of `rows`; what has no rows stays."""
    if isinstance(values, Tensor):
        return values[begin:end] if has_rows(values, rows) else values
    return mapped(lambda part: part[begin:end] if has_rows(part, rows) else part, values)


def joined(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Batches of so many samples as one. Real numbers that have no rows become their mean over all samples, and of
    everything else without rows the first batch's is kept."""
    if len(batches) == 1:
        return batches[0]

    def join(*each: Any) -> Any:
        if all(has_rows(part, size) for part, size in zip(each, sizes, strict=True)):
            return torch.cat(each)
        if not isinstance(each[0], Tensor) or not each[0].is_floating_point():
            return each[0]
        return sum(part * (size / sum(sizes)) for part, size in zip(each, sizes, strict=True))

    return mapped(join, *batches)
