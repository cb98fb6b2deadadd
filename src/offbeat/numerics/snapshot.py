"""What a module and a loss keep beside parameters and buffers: attributes, containers, plain tensors, objects.

A trial before a run takes snapshots between calls, to find state that would differ between clients, and puts them back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import setitem
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.numerics.attributes import INNER
from offbeat.numerics.buffers import equal_tensors

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_MOST = 10_000  # values that are looked at
_DEPTH = 6
_LOSS = "loss: "  # where paths into the loss begin
_LARGE = 1 << 20  # numbers of a tensor that is too large to be copied; it is known by itself alone


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
        self._names: list[tuple[dict[str, Any], set[str]]] = []  # of modules
        for number, root in enumerate(roots):
            start = _LOSS if number else ""
            if isinstance(root, nn.Module):
                for owner, part in root.named_modules():
                    self._attributes(vars(part), f"{start}{owner}." if owner else start, 0)
                    if number:  # the buffers of a loss belong to nobody else
                        self._attributes(part._buffers, f"{start}{owner}." if owner else start, 0)
                    self._names.append((vars(part), set(vars(part))))
                    for kind in type(part).__mro__:
                        self._class(kind, start, 0)
            else:
                self._inside(root, start, 0)

    def _attributes(self, names: dict[str, Any], path: str, depth: int) -> None:
        for name, value in list(names.items()):
            if name not in INNER:
                self._visit(value, f"{path}{name}", partial(setitem, names, name), depth)

    def _visit(self, value: Any, path: str, put: Callable[[Any], None] | None, depth: int) -> None:
        if len(self.values) >= _MOST or depth > _DEPTH or isinstance(value, nn.Module | nn.Parameter):
            return
        known = id(value) in self._visited and not isinstance(value, _NUMBERS)
        self._visited.add(id(value))
        if not known:
            self.values[path] = _Value(value, _saved(value), put)
            self._inside(value, f"{path}.", depth)

    def _inside(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, dict):
            for key, each in list(value.items()):
                self._visit(each, f"{path[:-1]}[{key!r}]", partial(setitem, value, key), depth + 1)
        elif isinstance(value, list | deque):
            for place, each in enumerate(list(value)):
                self._visit(each, f"{path[:-1]}[{place}]", partial(_set, value, place), depth + 1)
        elif isinstance(value, tuple | set | frozenset):
            for place, each in enumerate(value):
                self._visit(each, f"{path[:-1]}[{place}]", None, depth + 1)
        elif isinstance(value, FunctionType):
            self._function(value, path, depth)
        elif isinstance(value, MethodType):
            self._visit(value.__self__, f"{path}self", None, depth)
            if isinstance(value.__func__, FunctionType):
                self._function(value.__func__, path, depth)
        elif isinstance(value, partial):
            for name, each in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._visit(each, f"{path}{name}", None, depth + 1)
        elif _has_attributes(value):
            self._attributes(vars(value), path, depth + 1)
            for kind in type(value).__mro__:
                self._class(kind, path, depth)

    def _function(self, function: FunctionType, path: str, depth: int) -> None:
        """Closure, defaults, attributes, and the globals that the code of a user's function names."""
        if not _is_users(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if filled(cell):
                self._visit(cell.cell_contents, f"{path}{name}", partial(setattr, cell, "cell_contents"), depth + 1)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for place, value in enumerate(defaults):
            self._visit(value, f"{path}default{place}", None, depth + 1)
        self._attributes(vars(function), path, depth + 1)
        space = function.__globals__
        for name in function.__code__.co_names:
            if name in space and not isinstance(space[name], ModuleType | nn.Module):
                self._visit(space[name], f"{path}{name}", partial(setitem, space, name), depth + 1)

    def _class(self, kind: type, path: str, depth: int) -> None:
        """Numbers and containers of a user's class, and what its methods refer to."""
        if not _is_users(kind) or id(kind) in self._visited:
            return
        self._visited.add(id(kind))
        start = f"{_LOSS if path.startswith(_LOSS) else ''}{kind.__name__}."
        for name, value in list(vars(kind).items()):
            if name.startswith("__") and name != "__call__":
                continue
            if isinstance(value, FunctionType):
                self._function(value, f"{start}{name}.", depth + 1)
            elif isinstance(value, (*_NUMBERS, list, dict, set, deque, Tensor)):
                self._visit(value, f"{start}{name}", partial(setattr, kind, name), depth + 1)

    def changed(self, later: Snapshot) -> set[str]:
        """Return the paths whose values are others in a later snapshot, or were written meanwhile."""
        paths = {path for path, value in later.values.items() if path not in self.values}
        return paths | {
            path for path, value in self.values.items()
            if path not in later.values or not _same(value, later.values[path])
        }  # fmt: skip

    def restore(self) -> None:
        """Put every value back, and what tensors and containers had in them."""
        for names, before in self._names:
            for name in names.keys() - before - INNER:
                del names[name]
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


def _is_users(value: Any) -> bool:
    """Whether a function or a class is the user's own."""
    module = str(getattr(value, "__module__", "") or "")
    return module.split(".")[0] not in ("torch", "numpy", "builtins", "offbeat", "transformers")


def _saved(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.numel() > _LARGE:
            return None
        return value.detach().clone(), value._version
    if isinstance(value, np.ndarray | list | deque | dict | set):
        return value.copy()
    return dict(vars(value)) if _has_attributes(value) else None


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(
        value, type | ModuleType | FunctionType | MethodType | partial | Tensor | nn.Module
    )


def _same(one: _Value, other: _Value) -> bool:
    a, b = one.value, other.value
    if isinstance(a, Iterator):
        return False  # what it will give next cannot be seen
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


def filled(cell: Any) -> bool:
    """Whether a cell of a closure has a value."""
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that has no value yet
        return False


def head(path: str) -> str:
    """Return the path of the attribute whose value a path leads into.

    >>> head("block.0.calls['n'][0]")
    'block.0.calls'
    """
    return path.split("[")[0]


def attribute_name(path: str) -> str:
    """Return the attribute that a path leads through.

    >>> attribute_name("block.0.calls['n'][0]")
    'calls'
    """
    return head(path).removeprefix(_LOSS).rpartition(".")[2]


def attribute(path: str) -> str:
    """Return the attribute that a path leads through, in words."""
    return f"'{attribute_name(path)}'" + (" of the loss" if path.startswith(_LOSS) else "")
