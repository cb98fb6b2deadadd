"""The rule by which a wave is cut into tiles, and tiles are dealt out; it does not know how many compute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from offbeat.engines.tile_worker import Arrays, array
from offbeat.engines.updates import Plan
from offbeat.records import Begun


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


def plans_of(jobs: Sequence[Begun], plans: Sequence[Plan]) -> list[tuple[int, list[int], Arrays]]:
    """Those of the plans that take some of these jobs, as places and weights of these alone."""
    rows = {job[:2]: row for row, job in enumerate(jobs)}
    own = []
    for plan in plans:
        places = [place for place, name in enumerate(plan.jobs) if name in rows]
        if places:
            weights = {name: array(each[places]) for name, each in plan.weights.items()}
            own.append((plan.version, [rows[plan.jobs[place]] for place in places], weights))
    return own
