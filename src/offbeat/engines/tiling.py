"""The rules by which a wave is cut into tiles, tiles are dealt out, and their sums are added up. They do not know how
many compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from offbeat.engines.updates import Plan
from offbeat.records import Begun, JobName

Arrays: TypeAlias = dict[str, np.ndarray]
Span: TypeAlias = tuple[int, int]  # tiles of a wave: the number of the first, and how many: 1, 2, 4, ...


def tile_size(jobs: int, tiling: Mapping[str, int]) -> int:
    """Jobs in a tile of a wave of so many.

    >>> [tile_size(jobs, {"parts": 16, "least": 4, "most": 32}) for jobs in (1, 50, 100, 400, 1000)]
    [4, 4, 7, 25, 32]
    """
    return min(tiling["most"], max(tiling["least"], -(-jobs // tiling["parts"])))


def share(tiles: int, workers: int) -> int:
    """How many of the tiles that are left each worker is given at once: three quarters of an even share.

    >>> [share(tiles, 2) for tiles in (16, 4, 1)]
    [6, 2, 1]
    """
    return -(-3 * tiles // (4 * max(1, workers)))


def pieces(things: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """In order, as few as can be with at most so many each, and as even as can be.

    >>> pieces(range(10), 4)
    [range(0, 4), range(4, 7), range(7, 10)]
    """
    many = -(-len(things) // size)
    sizes = [len(things) // many + (i < len(things) % many) for i in range(many)]
    return [things[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


class PlanIndex(NamedTuple):
    """A plan, with the places of each of its jobs: one that was drawn several times counts as often."""

    version: int
    places: dict[JobName, list[int]]
    weights: Arrays


def index_of(plan: Plan) -> PlanIndex:
    weights = {name: each.cpu().numpy() for name, each in plan.weights.items()}
    places: dict[JobName, list[int]] = {}
    for place, name in enumerate(plan.jobs):
        places.setdefault(name, []).append(place)
    return PlanIndex(plan.version, places, weights)


def plans_of(jobs: Sequence[Begun], plans: Sequence[PlanIndex]) -> list[tuple[int, list[int], Arrays]]:
    """Those of the plans that take some of these jobs, as rows and weights of these alone."""
    own = []
    for plan in plans:
        mine = sorted((place, row) for row, job in enumerate(jobs) for place in plan.places.get(job[:2], ()))
        if mine:
            at, rows = map(list, zip(*mine, strict=True))
            own.append((plan.version, rows, {name: each[at] for name, each in plan.weights.items()}))
    return own


def plus(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Vectors by name, added; arrays that may be written, in their place: they are large."""
    total = {}
    for name, vector in one.items():
        if isinstance(vector, np.ndarray) and vector.flags.writeable:
            vector += other[name]
            total[name] = vector
        else:
            total[name] = vector + other[name]
    return total


def tiles_in(spans: Iterable[Span]) -> set[int]:
    """
    >>> tiles_in([(0, 2), (5, 1)])
    {0, 1, 5}
    """
    return {number for first, many in spans for number in range(first, first + many)}


def joined(sums: Mapping[Span, dict[str, Any]], mine: set[int] | None = None) -> dict[Span, dict[str, Any]]:
    """Sums of tiles, added two and two, then pairs of pairs and so on; only where all tiles of a pair are `mine`.

    The order of additions follows from the numbers of tiles alone, so whoever has neighbours may add them up at once.

    >>> tiles = {(0, 1): {"w": 1}, (1, 1): {"w": 2}, (2, 1): {"w": 4}, (3, 1): {"w": 8}, (5, 1): {"w": 16}}
    >>> joined(tiles, {0, 1, 2, 3, 5})
    {(0, 4): {'w': 15}, (5, 1): {'w': 16}}
    >>> joined({(0, 4): {"w": 15}, (5, 1): {"w": 16}})
    {(0, 8): {'w': 31}}
    """
    left, done, size = dict(sums), dict[Span, dict[str, Any]](), 1
    while left:
        if mine is None and len(left) == 1:
            return left
        for span in sorted(span for span in left if span[1] == size):
            value, first = left.pop(span), span[0] - span[0] % (2 * size)
            if mine is None or mine.issuperset(range(first, first + 2 * size)):
                pair = (first, 2 * size)
                left[pair] = plus(left[pair], value) if pair in left else value
            else:
                done[span] = value
        size *= 2
    return dict(sorted(done.items()))
