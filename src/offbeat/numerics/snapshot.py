"""What a module and a loss keep beside parameters and buffers: attributes, containers, plain tensors, objects.

A trial before a run takes snapshots between calls, to find state that would differ between clients, and puts them back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from operator import setitem
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.numerics.attributes import INNER
from offbeat.numerics.buffers import equal_tensors

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_MOST = 10_000  # values that are looked at
_DEPTH = 6


class _Value(NamedTuple):
    """One value: what it was, and how to put another one in its place."""

    value: Any
    saved: Any  # a copy of what a tensor or a container had in it
    put: Callable[[Any], None] | None


class Snapshot:
    """The values that can be reached from modules and losses, by path. Their parameters and buffers are left out."""

    def __init__(self, *roots: Any) -> None:
        self.values: dict[str, _Value] = {}
        self._visited: set[int] = set()
        for number, root in enumerate(roots):
            ending = " of the loss" if number else ""
            if isinstance(root, nn.Module):
                for owner, part in root.named_modules():
                    self._attributes(vars(part), f"{owner}." if owner else "", ending)
            else:
                self._inside(root, "", ending, 0)

    def _attributes(self, names: dict[str, Any], path: str, ending: str, depth: int = 0) -> None:
        for name, value in list(names.items()):
            if name not in INNER:
                self._visit(value, f"{path}{name}{ending}", partial(setitem, names, name), depth)

    def _visit(self, value: Any, path: str, put: Callable[[Any], None] | None, depth: int) -> None:
        if len(self.values) >= _MOST or depth > _DEPTH or isinstance(value, nn.Module | nn.Parameter):
            return
        known = id(value) in self._visited and not isinstance(value, _NUMBERS)
        self._visited.add(id(value))
        if not known:
            self.values[path] = _Value(value, _saved(value), put)
            self._inside(value, path, "", depth)

    def _inside(self, value: Any, path: str, ending: str, depth: int) -> None:
        if isinstance(value, dict):
            for key, each in list(value.items()):
                self._visit(each, f"{path}[{key!r}]", partial(setitem, value, key), depth + 1)
        elif isinstance(value, list | deque):
            for place, each in enumerate(list(value)):
                self._visit(each, f"{path}[{place}]", partial(_set, value, place), depth + 1)
        elif isinstance(value, tuple | set | frozenset):
            for place, each in enumerate(value):
                self._visit(each, f"{path}[{place}]", None, depth + 1)
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if _filled(cell):
                    put = partial(setattr, cell, "cell_contents")
                    self._visit(cell.cell_contents, f"{path}{name}{ending}", put, depth + 1)
            self._attributes(vars(value), path, ending, depth + 1)
        elif hasattr(value, "func") and callable(value):  # a partial
            self._visit(value.func, f"{path}.func{ending}", None, depth + 1)
        elif _has_attributes(value):
            self._attributes(vars(value), f"{path}." if path else "", ending, depth + 1)

    def changed(self, later: Snapshot) -> set[str]:
        """Return the paths whose values are others in a later snapshot, or were written meanwhile."""
        paths = {path for path, value in later.values.items() if path not in self.values}
        return paths | {
            path for path, value in self.values.items()
            if path not in later.values or not _same(value, later.values[path])
        }  # fmt: skip

    def restore(self) -> None:
        """Put every value back, and what tensors and containers had in them."""
        for value, saved, put in self.values.values():
            if put is not None:
                put(value)
            if _same(_Value(value, saved, None), _Value(value, _saved(value), None)) and not _has_attributes(value):
                continue
            if isinstance(value, Tensor) and saved is not None:
                value.data.copy_(saved[0])
            elif isinstance(value, np.ndarray):
                value[...] = saved
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(saved)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(saved)
            elif _has_attributes(value):
                for name in vars(value).keys() - saved.keys():
                    del vars(value)[name]

    def moved_on(self, paths: set[str], by: int) -> None:
        """Add to the numbers and tensors at these paths."""
        for path, (value, _, put) in self.values.items():
            if path not in paths or isinstance(value, bool | str | bytes):
                continue
            if isinstance(value, int | float | complex) and put is not None:
                put(value + by)
            elif isinstance(value, Tensor) and value.dtype != torch.bool and put is not None:
                put(value.detach() + by)


def _saved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.detach().clone(), value._version) if value.layout is torch.strided else None
    if isinstance(value, np.ndarray | list | deque | dict | set):
        return value.copy()
    return dict(vars(value)) if _has_attributes(value) else None


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | FunctionType | Tensor | nn.Module)


def _same(one: _Value, other: _Value) -> bool:
    a, b = one.value, other.value
    if isinstance(a, Tensor):
        if a is not b or one.saved is None or other.saved is None:
            return a is b
        return bool(one.saved[1] == other.saved[1]) and equal_tensors(one.saved[0], other.saved[0])
    if isinstance(a, np.ndarray):
        return a is b and np.array_equal(one.saved, other.saved)
    if isinstance(a, _NUMBERS):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if isinstance(a, list | deque):
        return a is b and [*map(id, one.saved)] == [*map(id, other.saved)]
    if isinstance(a, dict):
        return a is b and [(k, id(v)) for k, v in one.saved.items()] == [(k, id(v)) for k, v in other.saved.items()]
    if isinstance(a, set):
        return bool(one.saved == other.saved)
    return a is b


def _set(values: Any, place: int, new: Any) -> None:
    if place < len(values):
        values[place] = new


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


def head(path: str) -> str:
    """Return the path of the attribute whose value a path leads into.

    >>> head("block.0.calls['n'][0] of the loss")
    'block.0.calls of the loss'
    """
    return path.split("[")[0] + (" of the loss" if path.endswith(" of the loss") and "[" in path else "")


def attribute_name(path: str) -> str:
    """Return the attribute that a path leads through.

    >>> attribute_name("block.0.calls['n'][0] of the loss")
    'calls'
    """
    return path.split(" of the loss")[0].split("[")[0].rpartition(".")[2]


def attribute(path: str) -> str:
    """Return the attribute that a path leads through, in words."""
    return f"'{attribute_name(path)}'" + (" of the loss" if path.endswith(" of the loss") else "")
