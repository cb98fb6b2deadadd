"""What a module keeps beside parameters and buffers: a call may set it, and every call finds it as it was before.

A mask that is kept for the next call, a part of the loss for whoever asks: inside a wave such a tensor is of many
clients at once, and means nothing behind it. So a call leaves none. A model that lives on what earlier calls left is
refused before a run (`numerics/unseen.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

INNER = frozenset(vars(nn.Module())) - {"training"}  # what every module has
LARGE = 1000  # entries of a list or a table that a call is not expected to change


class Own(NamedTuple):
    """The attributes of one part."""

    names: dict[str, Any]
    there: dict[str, Any]  # what they were
    inside: list[tuple[Any, Any]]  # lists and tables, and what was in them


def attributes(module: nn.Module) -> list[Own]:
    own = []
    for part in module.modules():
        names = vars(part)
        there = {name: value for name, value in names.items() if name not in INNER}
        kept = [value for value in there.values() if type(value) in (list, dict) and len(value) <= LARGE]
        own.append(Own(names, there, [(value, value.copy()) for value in kept]))
    return own


def put_back(before: list[Own]) -> None:
    for names, there, inside in before:
        for name in [name for name in names if name not in INNER and name not in there]:
            del names[name]
        names.update(there)
        for value, was in inside:
            if isinstance(value, list):
                value[:] = was
            else:
                value.clear()
                value.update(was)


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    before = attributes(module)
    try:
        yield
    finally:
        put_back(before)
